"""The plan of a run: batches, step sizes, full passes, numbers of particles. All of it is said.

The default: batches grow geometrically from N/200 rows to all of them, then a few steps on all
rows, each after a move, the last with g = 1 and no guard.  That last step makes the weights exact
whatever the minibatches did, and brings certificate and evidence with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any

import numpy as np

from pmd import schedules
from pmd.errors import InputError, InputTypeError
from pmd.rejuvenate import Policy, Rejuvenate, Switch, when_degenerate

FIRST_BATCH = 200  # the first batch is the data over this
FULL_SHARE, FULL_LEAST = 0.3, 2  # of the passes that are steps on all rows
PAPER_BATCH = 10
PER_EVALUATION = 5.0  # likelihood evaluations that a particle costs in a short run


@dataclass(frozen=True)
class Plan:
    """What a run is going to do."""

    num_data: int
    dimension: int
    num_particles: int | schedules.Growth
    passes: float
    batch_size: int | schedules.Growth
    full_passes: int
    step_size: schedules.StepSize
    density: Any
    rejuvenate: Policy
    exact: str
    replace: bool
    evaluations: float | None = None
    seconds: float | None = None

    @property
    def budget(self) -> int:
        """Rows of the minibatch phase."""
        return max(0, round(self.passes * self.num_data) - self.full_passes * self.num_data)

    @property
    def most_particles(self) -> int:
        """The largest number of particles the plan asks for."""
        if isinstance(self.rejuvenate, Switch) and self.rejuvenate.num_particles:
            return max(self.rejuvenate.num_particles)
        if callable(self.num_particles):
            return max(self.particles_at(done) for done in np.linspace(0, 1, 101))
        return int(self.num_particles)

    @property
    def scheduled(self) -> bool:
        """Whether the number of particles follows a schedule instead of the fit's error."""
        given = getattr(self.rejuvenate, "num_particles", None) is not None
        return given or callable(self.num_particles)

    def particles_at(self, done: float) -> int:
        """Particles after a share of the planned rows."""
        few_many = getattr(self.rejuvenate, "num_particles", None)
        if few_many is not None:
            passes = done * self.budget / self.num_data
            return few_many[0] if passes < getattr(self.rejuvenate, "after", 0.0) else few_many[1]
        if callable(self.num_particles):
            return max(1, round(self.num_particles(done, self.num_data)))
        return int(self.num_particles)

    @property
    def first_batch(self) -> int:
        """Size of the first minibatch."""
        return self.size_at(0)

    def size_at(self, visited: int) -> int:
        """Size of the batch after so many rows of the minibatch phase."""
        left = self.budget - visited
        if not callable(self.batch_size):
            return min(int(self.batch_size), self.num_data, max(left, 1))
        size = int(self.batch_size(visited / max(self.budget, 1), self.num_data))
        size = max(1, min(size, self.num_data, left))
        return min(left, self.num_data) if left - size < size / 2 else size

    def steps(self, visited: int, t: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Sizes and mixing fractions of the next steps of the minibatch phase, at most `most`."""
        sizes, before, n = [], [], visited
        while n < self.budget and len(sizes) < most:
            size = self.size_at(n)
            sizes.append(size)
            before.append(n)
            n += size
        size = np.asarray(sizes, np.int64)
        return size, self.mixing(t, np.asarray(before, float), size.astype(float))

    def mixing(self, t: int, visited: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Mixing fractions of the steps after step t: what the schedule says, checked."""
        number = np.arange(t + 1, t + 1 + len(size))
        g = np.asarray(self.step_size(number, visited, size, self.num_data), float)
        g = np.broadcast_to(g, size.shape)
        wrong = ~((g > 0) & (g <= 1))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(
                f"step_size is {g[at]} at step {number[at]}: a mixing fraction must lie in (0, 1]"
            )
        return g

    def describe(self) -> str:
        """The plan in a sentence."""
        count = self.most_particles
        growing = callable(self.batch_size)
        batches = (
            f"batches growing from {self.first_batch} to {self.num_data} rows"
            if growing
            else f"batches of {self.batch_size}"
        )
        first = (self.passes - self.full_passes) if self.full_passes else self.passes
        number = "1 pass" if first == 1 else f"{first:g} passes"
        parts = [f"{count} particles", f"{number} in {batches}"]
        if self.full_passes:
            full = "1 step" if self.full_passes == 1 else f"{self.full_passes} steps"
            parts.append(f"then {full} on all {self.num_data} rows, the last exact")
        return ", ".join(parts)


def default_particles(dimension: int) -> int:
    """Enough for a quadratic in d dimensions to be fitted, and for its weights to be judged."""
    quadratic = (dimension + 1) * (dimension + 2) // 2
    return max(1500, 80 * dimension, round(1.5 * quadratic))


def affordable_particles(evaluations: float, dimension: int) -> int:
    """A number of particles that a budget of likelihood evaluations pays for."""
    return int(max(8, min(evaluations / PER_EVALUATION, default_particles(dimension))))


def make_plan(
    num_data: int,
    dimension: int,
    *,
    num_particles: int | Callable[..., float] | None,
    passes: float | None,
    batch_size: int | Callable[..., float] | None,
    full_passes: int | None,
    step_size: schedules.StepSize | float | None,
    density: Any,
    rejuvenate: Policy | None,
    exact: str | None,
    replace: bool,
    evaluations: float | None,
    seconds: float | None,
) -> Plan:
    """Check every argument and fill in what was not given."""
    from pmd.densities import regression

    density = regression() if density is None else density
    if not hasattr(density, "fit") or not hasattr(density, "guard"):
        raise InputTypeError(
            f"density must be one of pmd.densities, such as pmd.densities.regression(), "
            f"got {density!r}"
        )
    policy = when_degenerate() if rejuvenate is None else rejuvenate
    if not isinstance(policy, Rejuvenate | Switch):
        raise InputTypeError(
            f"rejuvenate must be a policy such as pmd.when_degenerate(0.5), got {rejuvenate!r}"
        )
    first = policy.first if isinstance(policy, Switch) else policy
    if first.always and hasattr(density, "independent"):
        density = replaced(density, independent=True)  # Algorithm 1 draws independently
    faithful = policy.papers or density.exact == "never"
    if exact is None:
        exact = "never" if faithful else density.exact
    if exact not in ("auto", "never", "always"):
        raise InputError(f'exact must be "auto", "never" or "always", got {exact!r}')
    for name, limit in (("evaluations", evaluations), ("seconds", seconds)):
        if limit is not None:
            check_number(name, limit, 0.0)
            if limit == 0:
                raise InputError(f"{name} must be positive, got 0; None is no limit")
    if passes is None:
        passes = 5.0 if evaluations is None else 3.0
    check_number("passes", passes, 0.0)
    if passes == 0:
        raise InputError("passes must be positive, got 0: nothing would be learnt from the data")
    if num_particles is None:
        num_particles = (
            default_particles(dimension)
            if evaluations is None
            else affordable_particles(evaluations, dimension)
        )
    if not callable(num_particles):
        check_count("num_particles", num_particles)
    elif policy.never:
        raise InputError(
            "num_particles is a schedule, but under rejuvenate=pmd.never() particles stay: give a "
            "number, or another policy"
        )
    if batch_size is None:
        first = min(num_data, max(10, num_data // FIRST_BATCH))
        batch_size = min(PAPER_BATCH, num_data) if faithful else schedules.geometric(first)
    elif not callable(batch_size):
        check_count("batch_size", batch_size)
        if batch_size > num_data:
            raise InputError(
                f"batch_size is {batch_size}, but there are only {num_data} rows: "
                f"give at most {num_data}"
            )
    if full_passes is None:
        full_passes = 0 if faithful else default_full_passes(passes)
    else:
        check_count("full_passes", full_passes, 0)
        if full_passes > passes:
            raise InputError(
                f"full_passes is {full_passes}, more than all {passes} passes: lower it or "
                "raise passes"
            )
    if step_size is None:
        step_size = schedules.rows_visited()
    elif not callable(step_size):
        check_number("step_size", step_size, 0.0)
        if not 0 < step_size <= 1:
            raise InputError(
                f"step_size is a mixing fraction in (0, 1] or a schedule of pmd.schedules, "
                f"got {step_size!r}"
            )
        step_size = schedules.constant(float(step_size))
    return Plan(
        num_data, dimension, num_particles, float(passes), batch_size, int(full_passes),
        step_size, density, policy, exact, bool(replace), evaluations, seconds,
    )  # fmt: skip


def default_full_passes(passes: float) -> int:
    """Steps on all rows out of so many passes: at least two where minibatches keep one.

    Under two passes there are none: from the prior, one step on all rows leaves a few particles.
    """
    wanted = max(FULL_LEAST, round(FULL_SHARE * passes))
    return min(wanted, int(passes) - 1) if passes >= 2 else 0


def check_number(name: str, value: Any, least: float) -> None:
    """A real number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InputTypeError(f"{name} must be a number, got {value!r}")
    if not value >= least or not np.isfinite(value):
        raise InputError(f"{name} must be at least {least:g} and finite, got {value}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputTypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")
