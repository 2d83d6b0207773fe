"""Looking for what a run cannot see by itself: an exact pass and an independent second run.

Weights are exact where the particles are and say nothing of where they are not.  A second run
from another seed loses other modes, if any, and its log-evidence then differs: that is the test.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pmd.certificate import pareto_k
from pmd.errors import InputError
from pmd.exact import log_density, posterior_iterate
from pmd.fitting import fit
from pmd.likelihood import Blocks
from pmd.mirror import initial
from pmd.posterior import Posterior
from pmd.problem import Flat, Problem
from pmd.result import NORMALISING
from pmd.rows import as_rows
from pmd.seeds import check_seed
from pmd.weights import ess, normalise

PyTree = Any

AGREE = 0.05  # nats between the log-evidences of two runs
DEVIATIONS = 3.0  # of their standard error, where that is more


class Exact(NamedTuple):
    """Draws of a density, weighed on all rows."""

    theta: np.ndarray
    log_joint: np.ndarray
    log_f: np.ndarray
    log_evidence: float
    error: float


def certify(
    posterior: Posterior,
    data: PyTree,
    problem: Problem | None = None,
    seed: int = 1,
    **options: Any,
) -> Posterior:
    """One more exact pass from fresh draws, and an independent second run, pooled with the first.

    Args:
        posterior: a result of `pmd.fit`.
        data: the rows it was fitted to.
        problem: needed for a posterior that was loaded.
        seed: of the second run; it must differ from the first one's.
        options: for `pmd.fit` of the second run.

    Returns:
        A posterior with the draws of both runs under one set of exact weights. Its certificate
        says whether the two agree, in evidence and in the masses of the modes.
    """
    problem = posterior.problem if problem is None else problem
    if problem is None:
        raise InputError("this posterior was loaded from a file: give certify its problem=")
    if check_seed(seed) == posterior.settings.get("seed"):
        raise InputError(f"seed={seed} is that of the run itself: an independent run needs another")
    flat = problem.flat()
    rows, num_data = as_rows(data)
    first = posterior if posterior.density is not None else posterior.kernel_estimate()
    count = len(posterior.theta)
    options.setdefault("num_particles", count)
    options.setdefault("passes", posterior.settings.get("passes"))
    options.setdefault("progress", False)
    second = fit(problem, data, seed=seed, **options)
    if second.density is None:
        second = second.kernel_estimate()
    passes = [
        weigh(flat, rows, num_data, run.density, count, seed + k)
        for k, run in enumerate((first, second))
    ]
    return pooled(posterior, first, second, passes, seed)


def weigh(flat: Flat, rows: PyTree, num_data: int, density: Any, count: int, seed: int) -> Exact:
    """Fresh draws of a density with the exact log joint density at each."""
    key = jax.random.fold_in(jax.random.key(seed), 0xCE27)
    draws = density.draw(key, count)
    theta = np.asarray(draws.theta, np.float64)
    log_joint = joint(flat, rows, num_data, theta)
    log_f = np.asarray(draws.log_f, np.float64)
    evidence, error = evidence_of(log_joint - log_f)
    return Exact(theta, log_joint, log_f, evidence, error)


def joint(flat: Flat, rows: PyTree, num_data: int, theta: np.ndarray) -> np.ndarray:
    """log p(theta) + sum_n log p(x_n | theta), in float64 on the host."""
    count = jnp.asarray(len(theta), jnp.int32)
    blocks = Blocks.choose(len(theta), 256, num_data)
    state = initial(flat, jax.random.key(0), count, blocks.capacity(len(theta)), num_data)
    points = jnp.asarray(theta, state.theta.dtype)
    it = posterior_iterate(state)._replace(reference=jnp.mean(points, axis=0))
    value, _, sums = log_density(flat, blocks, it, rows, points, count)
    reference = float(sums.reference_sum) + float(sums.reference_rest)
    return np.asarray(value, np.float64) + reference


def evidence_of(log_w: np.ndarray) -> tuple[float, float]:
    """log of the mean weight, and its standard error."""
    top = log_w.max()
    w = np.exp(log_w - top)
    size = float(ess(jnp.asarray(log_w)))
    return float(top + np.log(w.mean())), float(np.sqrt(max(1 / max(size, 1e-9) - 1 / len(w), 0)))


def pooled(
    posterior: Posterior,
    first: Posterior,
    second: Posterior,
    passes: list[Exact],
    seed: int,
) -> Posterior:
    """Both sets of draws under one mixture proposal, refitted, with the comparison's verdict."""
    theta = np.concatenate([p.theta for p in passes])
    log_joint = np.concatenate([p.log_joint for p in passes])
    proposals = np.stack([log_proposal(run.density, theta) for run in (first, second)])
    log_p0 = np.logaddexp(*proposals) - np.log(2)
    log_w = log_joint - log_p0
    evidence, error = evidence_of(log_w)
    apart = abs(passes[0].log_evidence - passes[1].log_evidence)
    within = max(AGREE, DEVIATIONS * float(np.hypot(passes[0].error, passes[1].error)))
    agrees = bool(apart <= within and within < 0.5 and same_modes(passes, theta, log_w, seed))
    density = refit(first, theta, log_joint, log_w, seed)
    before = posterior.certificate
    evaluations = posterior.evaluations + second.evaluations + len(theta)
    certificate = replace(
        before,
        pareto_k=pareto_k(log_w)[0],
        ess=float(ess(jnp.asarray(log_w))),
        num_particles=len(theta),
        log_evidence=evidence,
        log_evidence_error=error,
        minibatch_noise=0.0,
        exact_last=True,
        fit_error=float(np.asarray(density.error)),
        evaluations=evaluations,
        num_modes=max(before.num_modes, second.certificate.num_modes),
        unseen_mass=float(-np.expm1(-apart)),
        second_run="agrees" if agrees else "disagrees",
    )
    return posterior.replace(
        theta=theta, log_q=log_joint - evidence, log_p0=log_p0, density=density,
        log_evidence=evidence, log_evidence_error=error, certificate=certificate,
        evaluations=evaluations, atoms=False,
    )  # fmt: skip


def log_proposal(density: Any, theta: np.ndarray) -> np.ndarray:
    """log f, the density that draws come from: the one meant, unless it says otherwise."""
    drawn_from = getattr(density, "log_proposal", density.log_prob)
    return np.asarray(drawn_from(theta), np.float64)


def refit(
    first: Posterior, theta: np.ndarray, log_q: np.ndarray, log_w: np.ndarray, seed: int
) -> Any:
    """A density fitted to the pooled draws."""
    from pmd.densities import regression

    key = jax.random.fold_in(jax.random.key(seed), 0xF17)
    rule = regression()
    fitted = rule.fit(key, theta, log_q, log_w, num_draws=len(theta) // 2, previous=None)
    return fitted.normalise(jax.random.fold_in(key, 1), NORMALISING)


def same_modes(passes: list[Exact], theta: np.ndarray, log_w: np.ndarray, seed: int) -> bool:
    """Whether the two sets of draws, each under its own weights, give the modes the same masses."""
    from pmd.densities import mixture

    w = np.asarray(normalise(log_w), np.float64)
    with jax.enable_x64(True):
        found = mixture.clusters(jax.random.key(seed), jnp.asarray(theta), jnp.asarray(w))
        if len(found.log_pi) == 1:
            return True
        masses, errors = [], []
        for one in passes:
            v = np.asarray(normalise(one.log_joint - one.log_f))
            which = np.asarray(mixture.component_log_prob(found, jnp.asarray(one.theta))).argmax(1)
            inside = which[:, None] == np.arange(len(found.log_pi))
            mass = v @ inside
            masses.append(mass)
            errors.append((v**2) @ (inside - mass) ** 2)
    apart = np.abs(masses[0] - masses[1])
    return bool((apart <= np.maximum(AGREE / 2, DEVIATIONS * np.sqrt(errors[0] + errors[1]))).all())
