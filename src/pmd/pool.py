"""The last weights: draws of several fits, weighed exactly under one mixture of their densities.

Once every row counts in full the exact iterate no longer changes, so that every evaluation is
worth keeping: as a value for the next fit, and as a draw.  A draw's weight is its posterior over
the *mixture* of all densities drawn from (Veach and Guibas's balance heuristic), which no single
poor one can spoil.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from pmd.certificate import pareto_k
from pmd.exact import Iterate, log_density, posterior_iterate
from pmd.faults import move_not_finite
from pmd.moves import SWEEPS, MoveInfo, Mover, live, padded

if TYPE_CHECKING:
    from pmd.run import Run

PyTree = Any

WALKERS = 0.25  # of an effective draw: what a particle that walked counts for in a fit
SHARE, ENOUGH, TAIL = 0.4, 2.0, 0.45  # share, or number over m, and k that are good enough
LEAST_ESS = 50.0  # under which the draws are judged useless
ROUNDS = 20  # of draws, at most
DRAWN = 4  # times as many draws to shape a proposal by as are weighed
HOPELESS = 0.02  # effective share of the draws under which particles walk first


def joint(mover: Mover, it: Iterate, rows: PyTree, theta: np.ndarray, capacity: int) -> np.ndarray:
    """log p(theta) + sum_n log p(x_n | theta) at some vectors, in float64."""
    points = jnp.asarray(padded(np.asarray(theta, it.reference.dtype), capacity, theta[0]))
    count = jnp.asarray(len(theta), jnp.int32)
    with mover.clock("likelihood"):
        value, _, sums = log_density(mover.flat, mover.blocks, it, rows, points, count)
        reference = float(sums.reference_sum) + float(sums.reference_rest)
        return np.asarray(value, np.float64)[: len(theta)] + reference


@dataclass
class Pool:
    """Draws of several densities with the exact log joint density at each."""

    theta: list[np.ndarray] = field(default_factory=list)
    log_joint: list[np.ndarray] = field(default_factory=list)
    densities: list[Any] = field(default_factory=list)
    _log_f: list[np.ndarray] = field(default_factory=list)  # of density k at all points so far

    def add(self, theta: np.ndarray, log_joint: np.ndarray, density: Any) -> None:
        """More draws, and the density they come from."""
        before = self.points
        self.theta.append(np.asarray(theta, np.float64))
        self.log_joint.append(np.asarray(log_joint, np.float64))
        for k, other in enumerate(self.densities):
            more = np.asarray(other.log_proposal(self.theta[-1]), np.float64)
            self._log_f[k] = np.concatenate([self._log_f[k], more])
        self.densities.append(density)
        everything = np.concatenate([before, self.theta[-1]]) if len(before) else self.theta[-1]
        self._log_f.append(np.asarray(density.log_proposal(everything), np.float64))

    def __len__(self) -> int:
        return sum(map(len, self.theta))

    @property
    def points(self) -> np.ndarray:
        """All draws."""
        return np.concatenate(self.theta) if self.theta else np.zeros((0, 0))

    @property
    def log_q(self) -> np.ndarray:
        """Log joint density at all draws."""
        return np.concatenate(self.log_joint)

    @property
    def log_p0(self) -> np.ndarray:
        """Log-density of the mixture that the draws, taken together, come from."""
        share = np.log([len(part) / len(self) for part in self.theta])
        return np.asarray(logsumexp(np.stack(self._log_f) + share[:, None], axis=0))

    @property
    def log_weights(self) -> np.ndarray:
        """log joint - log p0."""
        return self.log_q - self.log_p0

    @property
    def log_evidence(self) -> float:
        """log of the mean weight."""
        return float(logsumexp(self.log_weights) - np.log(len(self)))

    @property
    def ess(self) -> float:
        """Effective number of draws."""
        log_w = self.log_weights
        if not len(log_w) or not np.isfinite(log_w).any():
            return 0.0
        total, squares = np.asarray(logsumexp(log_w)), np.asarray(logsumexp(2 * log_w))
        return float(np.exp(2 * total - squares))

    def good(self, num_particles: int) -> bool:
        """Whether the weights need no more draws: most of them count, or there are plenty."""
        if len(self) == 0 or self.ess < min(SHARE * len(self), ENOUGH * num_particles):
            return False
        return pareto_k(self.log_weights)[0] < TAIL

    def values(
        self, walkers: tuple[np.ndarray, np.ndarray] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the next fit learns from: draws, and particles that walked, as far as each tells."""
        if not len(self):
            assert walkers is not None
            return *walkers, np.zeros(len(walkers[0]))
        log_z, log_w = self.log_evidence, self.log_weights
        theta, log_q = self.points, self.log_q - log_z
        log_w = log_w - logsumexp(log_w)
        if walkers is not None:
            ours, theirs = self.ess, WALKERS * len(walkers[0])
            equal = np.full(len(walkers[0]), np.log(theirs / (ours + theirs) / len(walkers[0])))
            theta = np.concatenate([theta, walkers[0]])
            log_q = np.concatenate([log_q, walkers[1] - log_z])
            log_w = np.concatenate([log_w + np.log(ours / (ours + theirs)), equal])
        return theta, log_q, log_w + np.log(len(log_w))


def pool_draws(run: "Run") -> None:
    """Fit to all that is known of the posterior, draw, weigh; again while weights are poor.

    Starts from the particles of a run that has reached the posterior: they are draws of its last
    density, or they walked, and then they are values for the first fit and no more.
    """
    assert run.last_move is not None
    m, previous = run.mover.num_particles, run.last_move.density
    run.pool, run.walked = Pool(), run.last_move.action == "walk"
    theta, log_joint = posterior_values(run)
    walkers = (theta, log_joint) if run.walked else None
    if not run.walked:
        run.pool.add(theta, log_joint, previous)
    for k in range(ROUNDS):
        # A budget of evaluations is there to be spent; without one, enough is enough.
        count = int(min(m, run.budget.left(run.evaluations)))
        if count < m / 4 or (run.pool.good(m) and not run.budget.limited):
            return
        hopeless = k > 1 and walkers is None and run.pool.ess < HOPELESS * m
        payable = run.budget.pays(2 * SWEEPS * m, run.evaluations)
        if hopeless and payable and not run.mover.large:
            run.walk(2 * m)
            run.walked, walkers = True, posterior_values(run)
        previous = one_round(run, walkers, previous, count)


def one_round(
    run: "Run", walkers: tuple[np.ndarray, np.ndarray] | None, previous: Any, count: int
) -> Any:
    """A fit, `count` draws of it, and their weights; returns the density."""
    began = time.perf_counter()
    with run.clock("move"):
        # Draws that shape the proposal are of the fit: they cost no evaluations.
        density = run.plan.density.fit(
            run.next_key(), *run.pool.values(walkers), num_draws=DRAWN * count, previous=previous
        )
        theta = np.asarray(density.draw(run.next_key(), count).theta)
        run.pool.add(theta, run_joint(run, theta), density)
    share, seconds = run.pool.ess / len(run.pool), time.perf_counter() - began
    error, drawn = float(density.error), len(run.pool)
    run.record_move(MoveInfo("pool", density, error, np.nan, share, drawn, count, seconds))
    return density


def posterior_values(run: "Run") -> tuple[np.ndarray, np.ndarray]:
    """Particles of a run that has reached the posterior, with the log joint density at them."""
    theta, log_q, _ = live(run.state)
    best = int(np.argmax(log_q))
    run.evaluations += 1
    return theta, log_q + (run_joint(run, theta[best : best + 1])[0] - log_q[best])


def run_joint(run: "Run", theta: np.ndarray) -> np.ndarray:
    """The log joint density of parameters and all rows of a run; a NaN ends it."""
    value = joint(run.mover, posterior_iterate(run.state), run.rows, theta, run.capacity)
    bad = ~(value < np.inf)
    if bad.any():
        raise move_not_finite(run, theta[np.argmax(bad)])
    return value
