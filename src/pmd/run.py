"""One run: stretches of compiled steps with moves between them, then steps on all rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmd.budget import Budget
from pmd.clock import Clock
from pmd.exact import iterate
from pmd.faults import move_not_finite, not_finite
from pmd.likelihood import Blocks
from pmd.mirror import Info, State, Steps, initial, log_weights, stretch
from pmd.moves import MoveInfo, Mover, Redraw
from pmd.plan import Plan
from pmd.pool import Pool, pool_draws
from pmd.problem import Flat
from pmd.rejuvenate import Switch
from pmd.rows import Order
from pmd.weights import ess

PyTree = Any

AHEAD = 1024  # steps handed to the device at a time
SUBSTEPS = 3  # times that what the guard refused of a step is taken up again, on the same rows
EXTRA = 10  # full steps beyond the plan until one is taken whole
STARTING = 4  # times as many particles at the start
HIGH_GUARD, FULL_GUARD = 0.3, 0.1  # of the particles, while fits are poor
CHECK_SECONDS = 64  # steps between two looks at the clock


class Stopped(Exception):
    """A limit was reached; the run ends with what it has."""


class Refused(NamedTuple):
    """What the guard refused of a step, to be taken after a move on the same rows."""

    size: int
    left: float
    planned: float
    tries: int

    @staticmethod
    def of(before: "Refused | None", size: int, asked: float, taken: float) -> "Refused | None":
        """The rest of a step, unless it is small or was tried often enough."""
        planned, tries = (before.planned, before.tries + 1) if before else (asked, 1)
        left = 1 - (1 - asked) / (1 - taken) if taken < 1 else 0.0
        if left < 0.1 * planned or tries >= SUBSTEPS:
            return None
        return Refused(size, left, planned, tries)


class Run:
    """The state of a run on the host, and its phases."""

    def __init__(
        self,
        flat: Flat,
        rows: PyTree,
        plan: Plan,
        seed: int,
        report: Callable[["Run", dict[str, Any]], None] | None = None,
        spent: float = 0.0,
    ):
        self.flat, self.rows, self.plan, self.report = flat, rows, plan, report
        self.key = jax.random.key(seed)
        self.order = Order(plan.num_data, seed, plan.replace)
        blocks = Blocks.choose(plan.most_particles, plan.first_batch, plan.num_data)
        adaptive = (not plan.density.jittable and plan.exact != "never") or self._grows(plan)
        most = STARTING if adaptive else 1
        m = plan.most_particles
        self.clock = Clock()
        self.mover = Mover(flat, blocks, plan.density, plan.exact, m, self.clock, most)
        self.budget = Budget(plan, m)
        self.capacity = blocks.capacity(m * most)
        self.count = m * most if adaptive and not plan.scheduled else plan.particles_at(0.0)
        self.visited = self.consumed = 0
        self.settled = False  # whether a switch was made
        self.evaluations = spent
        self.count = self.affordable(self.count)
        self.history: list[dict[str, Any]] = []
        self.told = 0  # records that were reported
        self.last_move: MoveInfo | None = None
        self.stopped: str | None = None
        self.pool, self.walked = Pool(), False
        self.exact_last = False
        self.evidence = np.nan
        self.moves_made: list[MoveInfo] = []
        count = jnp.asarray(self.count, jnp.int32)
        kept = 0 if rows is None else plan.num_data
        self.state: State = initial(flat, self.next_key(), count, self.capacity, kept)

    @staticmethod
    def _grows(plan: Plan) -> bool:
        """Whether the number of particles follows the fit's error."""
        policy = plan.rejuvenate
        return not plan.density.jittable and not policy.never and not policy.always

    def next_key(self) -> Array:
        """A fresh random key."""
        self.key, key = jax.random.split(self.key)
        return key

    @property
    def guards(self) -> bool:
        """The paper's own strategies run without a guard."""
        return not self.plan.rejuvenate.papers

    @property
    def poor(self) -> bool:
        """Whether the last fit was poor."""
        last = self.last_move
        return last is not None and not last.error < self.mover.tolerance()

    def floor(self, share: float | None = None) -> float:
        """The effective sample size that a step must leave."""
        if not self.guards:
            return 0.0
        least: float = self.plan.density.guard if share is None else share
        if self.plan.exact != "never" and self.poor and not self.mover.large:
            least = max(least, HIGH_GUARD)
        return least * self.mover.num_particles

    # ------------------------------------------------------------------ phases
    def minibatches(self) -> None:
        """Stretches of steps on minibatches, with moves where the policy asks for them."""
        refused: Refused | None = None
        while self.visited < self.plan.budget:
            policy = self.plan.rejuvenate.at(self.visited / self.plan.num_data)
            self.between(policy)
            if refused is None:
                size, g = self.upcoming(policy)
            else:
                size, g = np.asarray([refused.size]), np.asarray([refused.left])
                self.consumed -= refused.size  # the same rows again
            infos, done = self.stretch(size, g, policy)
            taken, asked = float(infos.step_size[-1]), float(g[done - 1])
            whole = not self.guards or taken >= asked * (1 - 1e-6)
            refused = None if whole else Refused.of(refused, int(size[done - 1]), asked, taken)

    def between(self, policy: Any) -> None:
        """A move, if the policy asks for one now."""
        if int(self.state.t) == 0:
            return
        if policy.never:
            if isinstance(self.plan.rejuvenate, Switch) and not self.settled:
                self.settled = True  # many particles from here on
                wanted = self.affordable(self.count_at(0))
                if int(self.state.count) != wanted:
                    self.move(count=wanted)
            return
        if policy.always:
            if not self.plan.density.jittable:
                self.move(count=self.count_at(0))
            return
        count = int(self.state.count)
        dear = self.affordable(count) < count  # more particles than the rest can be paid with
        if dear or float(ess(log_weights(self.state))) < policy.ess * count:
            self.move()

    def upcoming(self, policy: Any) -> tuple[np.ndarray, np.ndarray]:
        """The steps that can be taken before anything but the weights has to be looked at."""
        most = AHEAD if policy.never or policy.always else CHECK_SECONDS
        if policy.always and not self.plan.density.jittable:
            most = 1
        if self.plan.seconds is not None or self.plan.evaluations is not None:
            most = min(most, CHECK_SECONDS)
        size, g = self.plan.steps(self.visited, int(self.state.t), most)
        ends = np.cumsum(size)
        start = self.consumed % self.plan.num_data
        fits = start + ends - size < self.plan.num_data  # begins in the pass on the device
        after = getattr(self.plan.rejuvenate, "after", None)
        if after is not None and self.visited < after * self.plan.num_data:
            fits &= self.visited + ends - size < after * self.plan.num_data
        keep = max(1, int(np.argmin(fits)) if not fits.all() else len(fits))
        return size[:keep], g[:keep]

    def stretch(self, size: np.ndarray, g: np.ndarray, policy: Any) -> tuple[Info, int]:
        """Steps on the device until particles have to move; books what was done."""
        every = policy.always and self.plan.density.jittable
        order, start = self.order.window(self.consumed)
        before = np.cumsum(size) - size
        most = self.affordable(self.plan.most_particles)
        counts = [min(self.count_at(n), most) for n in before] if every else []
        level = 0.0 if every or policy.never else min(policy.ess, 1.0) * int(self.state.count)
        redraw = Redraw(self.flat, self.plan.density) if every else None
        infos, done = self.device_steps(
            order, start + before, size, g, counts, self.floor(), level, redraw
        )
        used = int(size[:done].sum())
        self.consumed += used
        self.visited += used
        self.tell()
        self.limits()
        return infos, done

    def count_at(self, ahead: int) -> int:
        """Particles for a step so many rows ahead."""
        return self.plan.particles_at((self.visited + int(ahead)) / max(self.plan.budget, 1))

    def device_steps(
        self,
        order: Array,
        start: np.ndarray,
        size: np.ndarray,
        g: np.ndarray,
        counts: list[int],
        floor: float,
        level: float,
        draw: Redraw | None,
    ) -> tuple[Info, int]:
        """Call the compiled loop, and write its records into the history."""
        kind = self.state.log_q.dtype
        n = len(size)

        def fill(values: Any, dtype: Any) -> Array:
            out = np.zeros(AHEAD, dtype)
            out[:n] = values
            return jnp.asarray(out)

        count = int(self.state.count)
        steps = Steps(
            fill(start, np.int32), fill(size, np.int32), fill(g, kind),
            fill(counts if counts else count, np.int32),
        )  # fmt: skip
        with self.clock("likelihood"):
            self.state, infos, last = stretch(
                self.flat, self.mover.blocks, self.state, self.rows, order, steps,
                np.int32(0), np.int32(n), kind.type(floor), kind.type(level), self.next_key(), draw,
            )  # fmt: skip
            done = int(last)
        infos = jax.tree.map(lambda a: np.asarray(a[:done], np.float64), infos)
        self.book(infos, counts or [count] * done)
        if infos.bad[-1] > 0:
            at = int(start[done - 1])
            raise not_finite(self, np.asarray(order[at : at + int(size[done - 1])]))
        return infos, done

    def book(self, infos: Info, counts: list[int]) -> None:
        """One record a step."""
        visited = self.visited
        for i in range(len(infos.ess)):
            rows = int(infos.batch_size[i])
            visited += rows
            self.evaluations += counts[i] * rows / self.plan.num_data
            record = {
                "kind": "step",
                "pass": visited / self.plan.num_data,
                "rows": rows,
                "visited": visited,
                "step_size": float(infos.step_size[i]),
                "planned": float(infos.planned[i]),
                "ess": float(infos.ess[i]),
                "log_normaliser": float(
                    infos.log_normaliser[i] + infos.reference[i] + infos.reference_rest[i]
                ),
                "particles": counts[i],
                "evaluations": self.evaluations,
            }
            self.history.append(record)

    def tell(self) -> None:
        """Report the new records, now that the run's own numbers are up to date."""
        while self.told < len(self.history):
            self.told += 1
            if self.report is not None:
                self.report(self, self.history[self.told - 1])

    def full_steps(self) -> None:
        """Steps on all rows, each after a move, until one is taken whole."""
        planned = self.plan.full_passes
        for k in range(planned + EXTRA if planned else 0):
            m = self.mover.num_particles
            if k >= planned and not self.budget.pays(m, self.evaluations):
                self.stopped = "the budget of evaluations ended before a whole step on all rows"
                return
            if self.guards and int(self.state.t):
                self.move(exact_next=True)
            share = FULL_GUARD if self.careful else self.plan.density.guard
            last = (k >= planned - 1 and not self.careful) or not self.budget.pays(
                2 * m, self.evaluations
            )
            h = self.full_step(0.0 if last else self.floor(share))
            if k + 1 >= planned and h >= 1.0:
                break

    @property
    def careful(self) -> bool:
        """Whether the last fit was poor where walks are possible."""
        return self.plan.exact != "never" and self.poor and not self.mover.large

    def full_step(self, floor: float) -> float:
        """One step with g = 1 on all rows; a whole one makes the weights exact."""
        everything = jnp.arange(self.plan.num_data, dtype=jnp.int32)
        order = jnp.concatenate([everything, everything])
        size = np.asarray([self.plan.num_data])
        infos, _ = self.device_steps(order, np.zeros(1), size, np.ones(1), [], floor, 0.0, None)
        self.visited += self.plan.num_data
        h = float(infos.step_size[0])
        self.exact_last = h >= 1.0
        if self.exact_last:
            terms = infos.log_normaliser + infos.reference + infos.reference_rest
            self.evidence = float(terms[0])
        self.tell()
        self.limits()
        return h

    def finish(self) -> None:
        """Draws of further fits, weighed exactly and pooled, until the last weights are good."""
        judged = self.guards and self.exact_last and self.plan.exact != "never"
        if judged and self.last_move is not None and not self.plan.density.jittable:
            pool_draws(self)

    # ------------------------------------------------------------------ moves
    def move(
        self, count: int | None = None, exact_next: bool = False, allowance: float | None = None
    ) -> None:
        """Fit, draw, weigh, check; books what was done."""
        follow = count is None and not self.plan.scheduled  # the fit's error
        if count is None:
            count = self.affordable(self.count if follow else self.count_at(0))
        state, info = self.mover.move(
            self.next_key(), self.state, self.rows, count, self.last_move, exact_next,
            self.allowance() if allowance is None else allowance,
        )  # fmt: skip
        self.moved(state, info)
        if follow:
            wanted = self.mover.next_count(self.count, info.error)
            # What a budget pays for is used: with few particles, fits and weights go astray.
            self.count = max(wanted, self.count) if self.budget.limited else wanted
        self.record_move(info)

    def walk(self, count: int) -> None:
        """A walk of its own, without a fit."""
        state, info = self.mover.walk(
            self.next_key(), self.state, iterate(self.state), self.rows, count
        )
        self.moved(state, info)
        density = self.last_move.density if self.last_move else None
        error = self.last_move.error if self.last_move else np.nan
        self.record_move(info._replace(density=density, error=error))

    def moved(self, state: State, info: MoveInfo) -> None:
        """The state after a move; what a fit says of log q is not exact."""
        if info.culprit is not None:
            raise move_not_finite(self, info.culprit)
        self.state, self.exact_last = state, False

    def record_move(self, info: MoveInfo) -> None:
        """One record a move."""
        self.last_move = info
        self.moves_made.append(info._replace(density=None))
        self.evaluations += info.evaluations
        record = {
            "kind": "move",
            "action": info.action,
            "pass": self.visited / self.plan.num_data,
            "density": str(getattr(info.density, "name", "")),
            "components": int(getattr(info.density, "num_components", 1)),
            "error": info.error,
            "audit": info.audit,
            "ess": info.ess * info.count,
            "particles": info.count,
            "refused": int(getattr(info.density, "refused", 0)),
            "seconds": info.seconds,
            "evaluations": self.evaluations,
        }
        self.history.append(record)
        self.tell()
        self.limits()

    # ------------------------------------------------------------------ limits
    def allowance(self) -> float:
        """Likelihood evaluations that checks may cost."""
        return self.budget.allowance(self.evaluations, self.visited, int(self.state.count))

    def affordable(self, wanted: int) -> int:
        """As many particles as wanted, if the budget pays for them."""
        return self.budget.affordable(wanted, self.evaluations, self.visited)

    def limits(self) -> None:
        """Stop where time is up."""
        limit = self.plan.seconds
        if limit is not None and self.clock.elapsed > limit:
            self.stopped = f"stopped after {limit:g} seconds"
            raise Stopped
