"""From the end of a run to a posterior: the last density, evidence, noise, certificate."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pmd.certificate import Certificate, pareto_k
from pmd.exact import Iterate, log_density
from pmd.moves import AUDITED, Redraw, audited, live
from pmd.posterior import Posterior
from pmd.run import Run
from pmd.weights import ess

NORMALISING = 2**15  # draws behind the normaliser of the final density


def posterior_of(run: Run, warnings: tuple[str, ...], settings: dict[str, Any]) -> Posterior:
    """The posterior that a run has reached."""
    theta, log_q, log_w = live(run.state)
    good = float(ess(jnp.asarray(log_w)))
    error = float(np.sqrt(max(1.0 / max(good, 1e-9) - 1.0 / len(log_w), 0.0)))
    noise = 0.0 if run.exact_last else minibatch_noise(run)
    evidence = run.evidence if run.exact_last else float(run.state.log_evidence)
    atoms = run.plan.rejuvenate.never or not run.moves_made and not run.plan.full_passes
    density = None if atoms else final_density(run, theta, log_q, log_w)
    certificate = certify_run(run, density, log_w, evidence, float(np.hypot(error, noise)), noise)
    settings = {**settings, "plan": run.plan.describe(), "seconds": timings(run)}
    if run.stopped:
        settings["stopped"] = run.stopped
    return Posterior(
        structure=run.flat.structure,
        theta=theta,
        log_q=log_q,
        log_p0=log_q - log_w,
        density=density,
        log_evidence=evidence,
        log_evidence_error=float(np.hypot(error, noise)),
        certificate=certificate_with(certificate, warnings),
        history=run.history,
        evaluations=run.evaluations,
        settings=settings,
        problem=run.flat.problem,
        atoms=atoms,
    )


def certificate_with(certificate: Certificate, warnings: tuple[str, ...]) -> Certificate:
    """The certificate with what was said before the run."""
    from dataclasses import replace

    return replace(certificate, warnings=(*certificate.warnings, *warnings))


def final_density(run: Run, theta: np.ndarray, log_q: np.ndarray, log_w: np.ndarray) -> Any:
    """The density fitted to the last weighted particles, well normalised."""
    key = run.next_key()
    if run.plan.density.jittable:
        return Redraw(run.flat, run.plan.density).fitted(key, run.state)
    previous = run.last_move.density if run.last_move else None
    fitted = run.plan.density.fit(
        key, theta, log_q, log_w, num_draws=run.mover.num_particles, previous=previous
    )
    normalise = getattr(fitted, "normalise", None)
    return normalise(NORMALISING) if normalise is not None else fitted


def minibatch_noise(run: Run) -> float:
    """Posterior sd of what log q lacks: sum (c_n - 1) log p(x_n | theta), at a few particles."""
    theta, _, log_w = live(run.state)
    chosen = audited(run.next_key(), log_w)[:AUDITED]
    state = run.state
    num_data = run.plan.num_data
    it = Iterate(
        state.scale * state.row_weights - 1.0,
        jnp.arange(num_data, dtype=jnp.int32),
        jnp.asarray(num_data, jnp.int32),
        state.start_weight,
        state.reference,
    )
    capacity = len(state.theta)
    points = np.concatenate([theta[chosen], np.repeat(theta[:1], capacity - len(chosen), axis=0)])
    count = jnp.asarray(len(chosen), jnp.int32)
    points = jnp.asarray(points, state.theta.dtype)
    _, _, sums = log_density(run.flat, run.mover.blocks, it, run.rows, points, count)
    run.evaluations += len(chosen)
    w = np.exp(log_w[chosen] - log_w[chosen].max())
    value = np.asarray(sums.value, np.float64)[: len(chosen)]
    fine = np.isfinite(value)
    if not fine.any():
        return float("inf")
    w, value = w[fine] / w[fine].sum(), value[fine]
    return float(np.sqrt(w @ (value - w @ value) ** 2))


def certify_run(
    run: Run, density: Any, log_w: np.ndarray, evidence: float, error: float, noise: float
) -> Certificate:
    """The certificate of a run by itself."""
    made = run.moves_made
    kept = [move for move in made if move.action == "fit"]
    fits = [r for r in run.history if r["kind"] == "move" and r["density"]]
    steps = [r for r in run.history if r["kind"] == "step"]
    tolerance = run.mover.tolerance()
    checked = run.plan.exact != "never" and not run.mover.large
    poor = [m for m in kept if not m.error < tolerance]
    fitted_error = float(np.asarray(getattr(density, "error", np.nan)))
    return Certificate(
        pareto_k=pareto_k(log_w)[0],
        ess=float(ess(jnp.asarray(log_w))),
        num_particles=len(log_w),
        dimension=run.flat.dimension,
        log_evidence=evidence,
        log_evidence_error=error,
        minibatch_noise=noise,
        fit_error=fitted_error,
        exact=run.plan.exact,
        exact_last=run.exact_last,
        evaluations=run.evaluations,
        worst_kept_error=max((m.error for m in kept), default=float("nan")),
        worst_audit=max((m.audit for m in kept if m.audit == m.audit), default=float("nan")),
        kept=len(kept),
        reweighed=sum(m.action == "reweigh" for m in made),
        walked=sum(m.action == "walk" for m in made),
        refused=sum(r["refused"] for r in fits),
        guarded=sum(r["step_size"] < r["planned"] * (1 - 1e-6) for r in steps),
        unchecked_poor_fits=0 if checked else len(poor),
        num_modes=max((r["components"] for r in fits), default=1),
    )


def timings(run: Run) -> dict[str, float]:
    """Seconds by what they were spent on."""
    import time

    total = time.perf_counter() - run.began
    return {**{name: round(s, 3) for name, s in run.seconds.items()}, "all": round(total, 3)}


