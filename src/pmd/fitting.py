"""`pmd.fit`: data and a problem in, a posterior out.

(The module is not called `fit`, so that importing it never hides the function `pmd.fit`.)
"""

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
    settings: dict[str, Any] = {"seed": seed, "passes": plan.passes, "num_data": num_data, "exact": plan.exact}
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

    effort = 1
    spent = posterior.evaluations
    while posterior.certificate.verdict != "trust" and effort < MOST_EFFORT:
        effort *= 2
        count = plan.num_particles
        more = changed(
            plan,
            passes=plan.passes * effort,
            num_particles=count if callable(count) else int(count) * effort,
        )
        posterior = run_plan(flat, rows, more, seed, told, settings, progress, callback)
        spent += posterior.evaluations
        posterior.settings["until"] = (
            f"certified with {effort} times the passes and particles"
            if posterior.certificate.verdict == "trust"
            else f"not certified with {effort} times the passes and particles, the most tried"
            if effort >= MOST_EFFORT
            else ""
        )
        posterior.evaluations = spent
    posterior.settings.setdefault("until", "certified as planned")
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

        kind = StreamRun if isinstance(rows, Stream) else Run
        run = kind(flat, rows, plan, seed, report)
        run.evaluations += spent
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
    theta = flat.sample(jax.random.key(seed), jnp.arange(64))
    if not bool(jnp.isfinite(theta).all()):
        raise InputError("sample_prior (or start) drew NaN or infinite parameters")
    log_prior = np.asarray(flat.log_start(theta)), np.asarray(flat.log_prior(theta))
    for name, values in zip(("start", "log_prior"), log_prior, strict=True):
        if np.isnan(values).any() or np.isposinf(values).any():
            raise InputError(
                f"{name} is NaN or +inf at {int((~(values < np.inf)).sum())} of 64 draws of "
                "sample_prior: it must be a finite log-density there"
            )
        if np.isneginf(values).any():
            raise InputError(
                f"{name} is -inf at {int(np.isneginf(values).sum())} of 64 draws of sample_prior: "
                "a sampler must not draw what its density says is impossible"
            )
    few = jax.tree.map(lambda a: a[:CHECKED_ROWS], rows)
    values = np.asarray(flat.log_likelihood(theta, few))
    if np.isnan(values).any() or np.isposinf(values).any():
        row, particle = np.argwhere(np.isnan(values) | np.isposinf(values))[0]
        parameter = jax.tree.map(np.asarray, flat.structure.unravel(theta[particle]))
        raise InputError(
            f"log_likelihood is NaN or +inf at row {row} under {parameter}, a draw of the prior: "
            "return -inf where a row is impossible, and guard logarithms and divisions"
        )
    if np.isneginf(values).any(axis=0).all():
        raise InputError(
            "log_likelihood is -inf for every one of 64 draws of the prior: no parameter explains "
            "the first rows; widen the prior or give start="
        )
    return 64 * min(CHECKED_ROWS, num_data) / num_data


def doubts(plan: Plan) -> tuple[str, ...]:
    """What has to be said before the run."""
    from pmd.densities import regression

    told = []
    d, m = plan.dimension, plan.most_particles
    quadratic = (d + 1) * (d + 2) // 2
    if isinstance(plan.density, type(regression())) and m < quadratic:
        told.append(
            f"{m} particles are fewer than the {quadratic} coefficients of a quadratic in {d} "
            f"dimensions: the fits will be poor; give num_particles={round(1.5 * quadratic)} or more"
            + (
                f" (evaluations={plan.evaluations:g} pays for no more)"
                if plan.evaluations is not None
                else ""
            )
        )
    return tuple(told)
