"""The pieces under `pmd.fit`, for loops of one's own: init, step, move, posterior."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pmd import schedules
from pmd.errors import InputTypeError
from pmd.likelihood import Blocks
from pmd.mirror import Batch, Info, State, initial, step_batch
from pmd.moves import MoveInfo, Mover
from pmd.plan import check_count, make_plan
from pmd.posterior import Posterior
from pmd.problem import Flat, Problem
from pmd.rejuvenate import Policy

PyTree = Any

BATCH = 256  # rows taken at a time within a batch
GROWTH = 4  # times num_particles: room for what the default density asks for while fits are poor


@dataclass(frozen=True, eq=False)
class MirrorDescent:
    """Particle mirror descent as pure functions of a state; made by `pmd.mirror_descent`."""

    flat: Flat
    mover: Mover
    num_data: int
    num_particles: int
    step_size: schedules.StepSize
    rejuvenate: Policy

    @property
    def capacity(self) -> int:
        """Rows of the arrays of a state; those beyond `state.count` have weight zero."""
        return self.mover.blocks.capacity(self.num_particles * self.mover.most)

    def init(self, key: Array) -> State:
        """Particles from the prior (or `start=`), equally weighted."""
        count = jnp.asarray(self.num_particles, jnp.int32)
        return initial(self.flat, key, count, self.capacity, self.num_data)

    def step(
        self, state: State, batch: Batch, step_size: float | Array | None = None
    ) -> tuple[State, Info]:
        """One step of the recursion on a batch: pure, jittable, scannable.

            log q <- (1 - g) log q + g [ log p + (N/B) sum_b log p(x_b | .) ] - log Z

        The guard lowers g until the effective sample size after the step is at least the
        density's level (`density.guard`) times the number of particles; not for the paper's own
        strategies, `never` and `every_step`.

        Args:
            state: from `init`, `step` or `move`.
            batch: rows, their numbers in the data, and a mask of those that count.
            step_size: the mixing fraction g; from the schedule if not given.
        """
        kind = state.log_q.dtype
        if step_size is None:
            size = jnp.sum(batch.mask)
            step_size = self.step_size(state.t + 1, state.visited, size, self.num_data)
        guards = not self.rejuvenate.papers
        floor = self.mover.density.guard * self.num_particles if guards else 0.0
        g = jnp.asarray(step_size, kind)
        blocks = self.mover.blocks
        floor = jnp.asarray(floor, kind)
        return step_batch(self.flat, blocks, state, batch, self.num_data, g, floor)

    def move(
        self, key: Array, state: State, rows: PyTree, previous: MoveInfo | None = None
    ) -> tuple[State, MoveInfo]:
        """Fit a density to the particles, draw new ones from it, weigh them, check.

        Args:
            key: a random key.
            state: from `step`.
            rows: all rows of the data: what the checks evaluate the exact iterate on.
            previous: what the move before returned; its density is where the fit starts.
        """
        count = self.num_particles
        if previous is not None:
            count = self.mover.next_count(previous.count, previous.error)
        rows = jax.tree.map(jnp.asarray, rows)
        return self.mover.move(key, state, rows, count, previous)

    def posterior(self, state: State, seed: int = 0) -> Posterior:
        """The posterior at a state, with a density fitted to its particles."""
        from pmd.result import posterior_of_state

        return posterior_of_state(self, state, seed)


def mirror_descent(
    problem: Problem,
    *,
    num_data: int,
    num_particles: int = 2000,
    step_size: schedules.StepSize | float | None = None,
    rejuvenate: Policy | None = None,
    density: Any = None,
    exact: str | None = None,
) -> MirrorDescent:
    """Particle mirror descent for a loop of one's own.

    Args:
        problem: prior and likelihood.
        num_data: rows there are.
        num_particles: how many.
        step_size: a mixing fraction or a schedule (default `schedules.rows_visited(2.0)`).
        rejuvenate: when particles are meant to move; the loop is yours, this sets the guard.
        density: where they move to (default `densities.regression()`).
        exact: how far fits are checked: "auto", "never" or "always".

    Example:
        >>> import jax, pmd
        >>> problem = pmd.Problem(
        ...     log_prior=lambda theta: jax.scipy.stats.norm.logpdf(theta),
        ...     log_likelihood=lambda theta, row: jax.scipy.stats.norm.logpdf(row, theta),
        ...     sample_prior=lambda key: jax.random.normal(key),
        ... )
        >>> algorithm = pmd.mirror_descent(problem, num_data=100, num_particles=300)
        >>> state = algorithm.init(jax.random.key(0))
        >>> int(state.count)
        300
    """
    if not isinstance(problem, Problem):
        raise InputTypeError(f"problem must be a pmd.Problem, got {type(problem).__name__}")
    check_count("num_data", num_data)
    check_count("num_particles", num_particles)
    flat = problem.flat()
    plan = make_plan(
        num_data, flat.dimension, num_particles=num_particles, passes=5, batch_size=None,
        full_passes=None, step_size=step_size, density=density, rejuvenate=rejuvenate,
        exact=exact, replace=False, evaluations=None, seconds=None,
    )  # fmt: skip
    blocks = Blocks.choose(num_particles, BATCH, num_data)
    most = 1 if plan.density.jittable else GROWTH
    mover = Mover(flat, blocks, plan.density, plan.exact, int(num_particles), most=most)
    return MirrorDescent(flat, mover, num_data, int(num_particles), plan.step_size, plan.rejuvenate)
