"""`pmd.fit`: data and a problem in, a posterior out.

(The module is not called `fit`, so that importing it never hides the function `pmd.fit`.)
"""

import time
import warnings as python_warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmd.data.stream import Stream
from pmd.errors import InputError, InputTypeError, NotFiniteError
from pmd.plan import Plan, make_plan
from pmd.posterior import Posterior
from pmd.problem import Flat, Problem
from pmd.rejuvenate import Policy
from pmd.result import posterior_of_run
from pmd.rows import as_rows
from pmd.run import Run, Stopped
from pmd.schedules import Growth, StepSize
from pmd.seeds import check_seed
from pmd.stream_run import StreamRun

PyTree = Any

READ_ONCE = "Rows could be read only once: no fit was checked against the exact iterate."


def fit(
    problem: Problem,
    data: PyTree,
    *,
    num_particles: int | Growth | None = None,
    passes: float | None = None,
    batch_size: int | Growth | None = None,
    full_passes: int | None = None,
    step_size: StepSize | float | None = None,
    density: Any = None,
    rejuvenate: Policy | None = None,
    exact: str | None = None,
    start: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    replace: bool = False,
    until: str | None = None,
    evaluations: float | None = None,
    seed: int = 0,
    progress: bool = True,
    seconds: float | None = None,
    callback: Callable[[dict[str, Any]], Any] | None = None,
) -> Posterior:
    """The posterior of a problem given rows of data.

    Particle mirror descent (the paper's Algorithm 1) with a default plan: batches that grow from
    N/200 rows to all of them, then a few steps on all rows, the last of which makes the weights
    exact.  Everything that is None is chosen, and the result says how.

    Args:
        problem: prior and likelihood.
        data: rows: an array, or a pytree of arrays, with rows along the first axis; or a
            `pmd.data.stream` of batches that cannot be read again.
        num_particles: how many, or a schedule such as `schedules.geometric(200, 1500)`.
        passes: rows visited by planned steps, over the rows there are (default 5; checks and
            further full steps come on top).
        batch_size: rows a minibatch, or a schedule. A number fixes it.
        full_passes: how many of the passes are steps on all rows, at the end; 0 for none.
        step_size: a mixing fraction or a schedule of `pmd.schedules`.
        density: where particles move to: one of `pmd.densities`.
        rejuvenate: when they move: `pmd.never()`, `every_step()`, `switch(...)`,
            `when_degenerate(0.5)`.
        exact: how far fits are checked: "auto", "never" or "always".
        start: `(sample, log_density)` of a density to start from instead of the prior.
        replace: draw rows with replacement (the paper's) instead of a permutation each pass.
        until: "certified" adds passes and particles, up to 8 times both, until the certificate
            says "trust".
        evaluations: a budget of likelihood evaluations (particles x rows / N), kept to.
        seed: an integer; the same seed gives the same result on the same machine.
        progress: show a progress bar.
        seconds: stop after so many.
        callback: called with every record of the history; returning True ends the run.

    Returns:
        A `pmd.Posterior`.

    Example:
        >>> import jax, numpy as np, pmd
        >>> problem = pmd.Problem(
        ...     log_prior=lambda theta: jax.scipy.stats.norm.logpdf(theta),
        ...     log_likelihood=lambda theta, row: jax.scipy.stats.norm.logpdf(row, theta),
        ...     sample_prior=lambda key: jax.random.normal(key),
        ... )
        >>> x = np.random.default_rng(0).normal(1.0, 1.0, 200)
        >>> posterior = pmd.fit(problem, x, num_particles=500, passes=3, progress=False)
        >>> bool(abs(posterior.mean() - x.sum() / 201) < 0.01)
        True
    """
    if not isinstance(problem, Problem):
        raise InputTypeError(f"problem must be a pmd.Problem, got {type(problem).__name__}")
    if until not in (None, "certified"):
        raise InputError(f'until must be None or "certified", got {until!r}')
    if callback is not None and not callable(callback):
        raise InputTypeError(f"callback must be a function of one record, got {callback!r}")
    if start is not None:
        problem = Problem(
            problem.log_prior, problem.log_likelihood, problem.sample_prior, start=start,
            log_likelihood_batch=problem.log_likelihood_batch, constraints=problem.constraints,
        )  # fmt: skip
    seed = check_seed(seed)
    flat = problem.flat()
    once = isinstance(data, Stream)
    rows, num_data = (data, data.num_data) if once else as_rows(data)
    if not once:
        flat.check_likelihood(rows)
    plan = make_plan(
        num_data, flat.dimension, num_particles=num_particles, passes=passes,
        batch_size=1 if once else batch_size, full_passes=0 if once else full_passes,
        step_size=step_size, density=density, rejuvenate=rejuvenate,
        exact="never" if once else exact, replace=replace, evaluations=evaluations,
        seconds=seconds,
    )  # fmt: skip
    spent = 0.0 if once else check_values(flat, rows, seed, num_data)
    told = doubts(plan) + ((READ_ONCE,) if once else ())
    for sentence in doubts(plan):
        python_warnings.warn(sentence, stacklevel=2)
    settings: dict[str, Any] = {
        "seed": seed,
        "passes": plan.passes,
        "num_data": num_data,
        "exact": plan.exact,
    }
    posterior = run_plan(flat, rows, plan, seed, told, settings, progress, callback, spent)
    if until is None:
        return posterior
    return until_certified(flat, rows, plan, seed, told, settings, progress, callback, posterior)


CHECKED_ROWS = 16  # rows on which the likelihood is tried before a run
MOST_EFFORT = 8  # times the passes and particles of the plan that `until="certified"` goes up to


def until_certified(
    flat: Flat, rows: PyTree, plan: Plan, seed: int, told: tuple[str, ...],
    settings: dict[str, Any], progress: bool, callback: Any, posterior: Posterior,
) -> Posterior:  # fmt: skip
    """Twice the passes and particles, again and again, until the certificate says trust."""
    from dataclasses import replace as changed

    effort, spent = 1, posterior.evaluations
    last = spent
    began = time.perf_counter() - posterior.settings["seconds"]["all"]
    ended = ""
    while posterior.certificate.verdict != "trust" and not ended:
        count, budget, seconds = plan.num_particles, plan.evaluations, plan.seconds
        left = None if seconds is None else seconds + began - time.perf_counter()
        if "stopped" in posterior.settings:
            ended = posterior.settings["stopped"]
        elif (budget is not None and budget - spent < last) or (left is not None and left <= 0):
            ended = "the budget is spent"
        elif effort >= MOST_EFFORT:
            ended = f"{effort} times the passes and particles are the most tried"
        else:
            effort *= 2
            more = changed(
                plan,
                passes=plan.passes * effort,
                num_particles=count if callable(count) else int(count) * effort,
                evaluations=None if budget is None else budget - spent,
                seconds=left,
            )
            posterior = run_plan(flat, rows, more, seed, told, settings, progress, callback)
            last = posterior.evaluations
            spent += last
    posterior.settings["until"] = (
        f"not certified: {ended}"
        if ended
        else f"certified with {effort} times the passes and particles"
        if effort > 1
        else "certified as planned"
    )
    posterior.evaluations = spent
    return posterior


def run_plan(
    flat: Flat, rows: PyTree, plan: Plan, seed: int, told: tuple[str, ...],
    settings: dict[str, Any], progress: bool, callback: Any, spent: float = 0.0,
) -> Posterior:  # fmt: skip
    """One run of a plan, from the start to a posterior."""
    from pmd.progress import bar

    with bar(plan) if progress else nullcontext() as shown:

        def report(run: Run, record: dict[str, Any]) -> None:
            if shown is not None:
                shown(run, record)
            if callback is not None and callback(record) is True:
                run.stopped = "stopped by the callback"
                raise Stopped

        once = isinstance(rows, Stream)
        run = (
            StreamRun(flat, rows, plan, seed, report)
            if once
            else Run(flat, rows, plan, seed, report, spent)
        )
        try:
            run.minibatches()
            run.full_steps()
            run.finish()
        except Stopped:
            pass
        except KeyboardInterrupt:
            run.stopped = "interrupted"
        except NotFiniteError as error:
            run.stopped = "stopped by a NaN"
            error.posterior = posterior_of_run(run, settings, told)
            raise
        return posterior_of_run(run, settings, told)


def check_values(flat: Flat, rows: PyTree, seed: int, num_data: int) -> float:
    """The functions' values at a few draws of the start and a few rows, before any long work.

    Returns the likelihood evaluations that it took.
    """
    draws, few = 64, jax.tree.map(lambda a: a[:CHECKED_ROWS], rows)
    cost = min(CHECKED_ROWS, num_data) / num_data
    sampler = "sample_prior" if flat.problem.start is None else "start"
    theta = flat.sample(jax.random.key(seed), jnp.arange(draws))
    if not bool(jnp.isfinite(theta).all()):
        raise InputError(
            f"{sampler} drew NaN or infinite parameters"
            + (", or some outside their constraints" if flat.structure.constrained else "")
        )
    densities = [("log_prior", flat.log_prior)]
    if flat.problem.start is not None:
        densities.append(("start", flat.log_start))
    for name, density in densities:
        check_density(flat, name, np.asarray(density(theta)), theta, sampler)
    values = np.asarray(flat.log_likelihood(theta, few))
    wrong = ~(values < np.inf)
    if wrong.any():
        row, particle = np.argwhere(wrong)[0]
        raise InputError(
            f"log_likelihood is {values[row, particle]} at row {row} under "
            f"{shown(flat, theta[particle])}, a draw of {sampler}: return -inf where a row is "
            "impossible, and guard logarithms and divisions"
        )
    if np.isneginf(values).any(axis=0).all():  # few may be possible: look further before refusing
        draws += 4096
        theta = flat.sample(jax.random.key(seed), jnp.arange(64, draws))
        if np.isneginf(np.asarray(flat.log_likelihood(theta, few))).any(axis=0).all():
            raise InputError(
                f"log_likelihood is -inf for every one of {draws} draws of {sampler}: no parameter "
                "explains the first rows; widen the prior or give start="
            )
    return draws * cost


def check_density(
    flat: Flat, name: str, values: np.ndarray, theta: jax.Array, sampler: str
) -> None:
    """A log-density at draws: never NaN or +inf, and not -inf at draws of its own sampler."""
    own = name == ("log_prior" if sampler == "sample_prior" else "start")
    wrong = ~(values < np.inf) | (np.isneginf(values) & own)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(
            f"{name} is {values[at]} at {shown(flat, theta[at])}, a draw of {sampler} (and at "
            f"{int(wrong.sum())} of {len(values)}): a log-density is never NaN or +inf, and a "
            "sampler must not draw what its density says is impossible"
        )


def shown(flat: Flat, vector: jax.Array) -> Any:
    """A parameter, to be shown in a message."""
    return jax.tree.map(lambda a: np.asarray(a).tolist(), flat.structure.unravel(vector))


def doubts(plan: Plan) -> tuple[str, ...]:
    """What has to be said before the run."""
    from pmd.densities import regression

    told = []
    d, m = plan.dimension, plan.most_particles
    quadratic = (d + 1) * (d + 2) // 2
    if isinstance(plan.density, type(regression())) and m < quadratic:
        told.append(
            f"{m} particles are fewer than the {quadratic} coefficients of a quadratic in {d} "
            "dimensions: the fits will be poor; give "
            f"num_particles={round(1.5 * quadratic)} or more"
            + (
                f" (evaluations={plan.evaluations:g} pays for no more)"
                if plan.evaluations is not None
                else ""
            )
        )
    return tuple(told)
