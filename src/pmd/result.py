"""From the end of a run to a posterior: the last density, evidence, noise, certificate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmd.algorithm import MirrorDescent
from pmd.certificate import Certificate, pareto_k
from pmd.exact import iterate, log_density
from pmd.mirror import State
from pmd.moves import MoveInfo, Mover, Redraw, audited, live, padded
from pmd.pool import LEAST_ESS
from pmd.posterior import Posterior
from pmd.run import Run
from pmd.weights import ess

PyTree = Any

NORMALISING = 2**15  # draws behind the normaliser of the final density


class Record(NamedTuple):
    """What happened on the way to a state."""

    history: list[dict[str, Any]]
    moves: list[MoveInfo]
    evaluations: float
    settings: dict[str, Any]
    warnings: tuple[str, ...] = ()


def posterior_of_run(
    run: Run, settings: dict[str, Any], warnings: tuple[str, ...] = ()
) -> Posterior:
    """The posterior that a run has reached."""
    noise, evidence = 0.0, run.evidence
    if not run.exact_last and not len(run.pool):
        noise, evidence = float("nan"), float(run.state.log_evidence)
        if run.rows is not None:
            noise, lacking, spent = minibatch_noise(run)
            run.evaluations, evidence = run.evaluations + spent, evidence + lacking
    stopped = {"stopped": run.stopped} if run.stopped else {}
    settings = {**settings, "plan": run.plan.describe(), **stopped}
    record = Record(run.history, run.moves_made, run.evaluations, settings, warnings)
    atoms = run.plan.rejuvenate.at(run.visited / run.plan.num_data).never
    previous = run.last_move.density if run.last_move else None
    posterior = assemble(
        run.flat, run.mover, last_weights(run, evidence), run.next_key(), record, noise=noise,
        exact_last=run.exact_last or len(run.pool) > 0, atoms=atoms, previous=previous,
    )  # fmt: skip
    posterior.settings["seconds"] = run.clock.shares()
    return posterior


class Weighted(NamedTuple):
    """Weighted particles of the result, and the log-weights that it is judged by."""

    theta: np.ndarray
    log_q: np.ndarray
    log_w: np.ndarray
    judged: np.ndarray
    log_evidence: float
    state: State


def last_weights(run: Run, evidence: float) -> Weighted:
    """The pooled draws; particles that walked where these are useless, but judged by them."""
    pool, (theta, log_q, log_w) = run.pool, live(run.state)
    if not len(pool):
        return Weighted(theta, log_q, log_w, log_w, evidence, run.state)
    judged = pool.log_weights - pool.log_evidence
    if pool.ess < LEAST_ESS and run.walked:
        return Weighted(theta, log_q, log_w, judged, pool.log_evidence, run.state)
    points, log_joint = pool.points, pool.log_q - pool.log_evidence
    return Weighted(points, log_joint, judged, judged, pool.log_evidence, run.state)


def posterior_of_state(algorithm: MirrorDescent, state: State, seed: int = 0) -> Posterior:
    """The posterior at a state of one's own loop; exact if all rows count once, and no fit does."""
    weights = np.asarray(state.scale * state.row_weights, np.float64)
    whole = np.abs(weights - 1).max() < 1e-5 and float(state.start_weight) == 0
    exact_last = bool(whole and state.exact)
    count = int(state.count)
    record = Record([], [], float("nan"), {"plan": f"{count} particles, {int(state.t)} steps"})
    theta, log_q, log_w = live(state)
    return assemble(
        algorithm.flat, algorithm.mover,
        Weighted(theta, log_q, log_w, log_w, float(state.log_evidence), state),
        jax.random.key(seed), record, noise=0.0 if exact_last else float("nan"),
        exact_last=exact_last, atoms=algorithm.rejuvenate.never, previous=None,
    )  # fmt: skip


def assemble(
    flat: Any, mover: Mover, last: Weighted, key: Array, record: Record, *, noise: float,
    exact_last: bool, atoms: bool, previous: Any,
) -> Posterior:  # fmt: skip
    """The posterior of weighted particles, with a density fitted to them and a certificate."""
    density = None if atoms else final_density(mover, last, key, previous)
    size = float(ess(jnp.asarray(last.judged)))
    error = float(np.hypot(np.sqrt(max(1 / max(size, 1e-9) - 1 / len(last.judged), 0.0)), noise))
    certificate = certify(
        mover, record, density, last.judged, evidence=last.log_evidence, error=error, noise=noise,
        exact_last=exact_last,
    )  # fmt: skip
    alive = np.isfinite(last.log_w)  # the rest weighs nothing, wherever it was drawn from
    log_p0 = np.where(alive, last.log_q, 0.0) - np.where(alive, last.log_w, 0.0)
    return Posterior(
        structure=flat.structure, theta=last.theta, log_q=last.log_q, log_p0=log_p0,
        density=density, log_evidence=last.log_evidence,
        log_evidence_error=error, certificate=certificate, history=record.history,
        evaluations=record.evaluations, settings=record.settings, problem=flat.problem,
        atoms=atoms,
    )  # fmt: skip


def final_density(mover: Mover, last: Weighted, key: Array, previous: Any) -> Any:
    """The density fitted to the last weighted particles, well normalised."""
    if mover.density.jittable:
        return Redraw(mover.flat, mover.density).fitted(key, last.state)
    fit_key, normalise_key = jax.random.split(key)
    fitted = mover.density.fit(
        fit_key, last.theta, last.log_q, last.log_w, num_draws=mover.num_particles,
        previous=previous,
    )  # fmt: skip
    normalise = getattr(fitted, "normalise", None)
    return fitted if normalise is None else normalise(normalise_key, NORMALISING)


def minibatch_noise(run: Run) -> tuple[float, float, int]:
    """Posterior sd of what log q lacks, sum (1 - c_n) log p(x_n | theta), at a few particles.

    Returns the figure, what the log-evidence lacks for the same reason, log E_q exp of that sum,
    and the likelihood evaluations that it took.
    """
    theta, _, log_w = live(run.state)
    chosen = audited(run.next_key(), log_w)
    num_data = run.plan.num_data
    it = iterate(run.state)._replace(
        row_weights=run.state.scale * run.state.row_weights - 1.0,
        index=jnp.arange(num_data, dtype=jnp.int32),
        seen=jnp.asarray(num_data, jnp.int32),
    )
    capacity, kind = len(run.state.theta), run.state.theta.dtype
    points = jnp.asarray(padded(theta[chosen].astype(kind), capacity, theta[0]))
    count = jnp.asarray(len(chosen), jnp.int32)
    _, _, sums = log_density(run.flat, run.mover.blocks, it, run.rows, points, count)
    value = np.asarray(sums.value, np.float64)[: len(chosen)]
    w = np.exp(log_w[chosen] - log_w[chosen].max())
    fine = np.isfinite(value)
    if not w[fine].sum() > 0:
        return float("inf"), 0.0, len(chosen)
    w, value = w[fine] / w[fine].sum(), value[fine]
    sd = float(np.sqrt(w @ (value - w @ value) ** 2))
    reference = float(sums.reference_sum) + float(sums.reference_rest)
    lacking = float(np.log(w @ np.exp(value.min() - value))) - value.min() - reference
    return sd, lacking, len(chosen)


def certify(
    mover: Mover, record: Record, density: Any, log_w: np.ndarray, *, evidence: float,
    error: float, noise: float, exact_last: bool,
) -> Certificate:  # fmt: skip
    """The certificate of a run by itself."""
    made, tolerance = record.moves, mover.tolerance()
    kept = [move for move in made if move.action == "fit"]
    audits = [move.audit for move in kept if np.isfinite(move.audit)]
    fits = [r for r in record.history if r["kind"] == "move"]
    steps = [r for r in record.history if r["kind"] == "step"]
    num_modes = max((r["components"] for r in fits), default=1)
    # Many coordinates: walks would not mix, and one component leaves little to be lost.
    checked = mover.exact != "never" and (not mover.large or num_modes == 1)
    poor = 0 if checked else sum(not move.error < tolerance for move in kept)
    return Certificate(
        pareto_k=pareto_k(log_w)[0],
        ess=float(ess(jnp.asarray(log_w))),
        num_particles=len(log_w),
        dimension=mover.dimension,
        log_evidence=evidence,
        log_evidence_error=error,
        minibatch_noise=noise,
        fit_error=float(np.asarray(getattr(density, "error", np.nan))),
        exact=mover.exact,
        exact_last=exact_last,
        evaluations=record.evaluations,
        worst_kept_error=max((move.error for move in kept), default=float("nan")),
        worst_audit=max(audits, default=float("nan")),
        kept=len(kept),
        reweighed=sum(move.action == "reweigh" for move in made),
        walked=sum(move.action == "walk" for move in made),
        refused=sum(r["refused"] for r in fits),
        guarded=sum(r["step_size"] < r["planned"] * (1 - 1e-6) for r in steps),
        unchecked_poor_fits=poor,
        num_modes=num_modes,
        warnings=record.warnings,
    )
