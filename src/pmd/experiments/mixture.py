"""The paper's mixture: two tied means, two modes, on a grid where the truth is known.

    x  ~  N(theta_1, 2.5^2) / 2  +  N(theta_1 + theta_2, 2.5^2) / 2,      theta_1, theta_2 ~ N(0, 1)

1000 rows from theta = (1, -2); the other mode lies at (-1, 2).  Batches of 10, 1500 particles.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm

import pmd
from pmd.errors import InputError, InputTypeError
from pmd.experiments.grid import Grid, Known, known, log_iterates, row_weights, score
from pmd.posterior import Posterior
from pmd.problem import Problem
from pmd.seeds import check_seed

NUM_DATA, BATCH, PARTICLES = 1000, 10, 1500
THETA, SCALE = (1.0, -2.0), 2.5
HALF, POINTS = 4.5, 181  # of the grid
FIRST, FEW = 300, 500  # particles at the start of strategy 2; while they move, in the switch
WIDTH = 2.0  # c of h = c m^(-1/2): with 1, strategy 2 loses a mode in most runs, with 2 in few
SWITCH = 0.75  # passes after which the switch lets its particles stay
LENGTHS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0)  # passes of the runs behind a curve, where shorter
WHOLE = (2.0, 3.0, 5.0)  # the same for the default, whose plan is made of whole passes
EVERY = 0.05  # passes between two points of the curve without particles
FLOOR, FLOOR_REPLACE = "grid", "grid-replace"  # series without particles


class Strategy(StrEnum):
    """When particles move."""

    DEFAULT = "default"
    NEVER = "never"
    EVERY_STEP = "every-step"
    SWITCH = "switch"


@dataclass(frozen=True)
class Settings:
    """What to run."""

    data_seed: int = 1
    seeds: int = 1
    strategies: tuple[Strategy, ...] = tuple(Strategy)
    passes: float = 5.0
    num_particles: int = PARTICLES
    points: int = POINTS

    def __post_init__(self) -> None:
        check_seed(self.data_seed)
        for name, least in (("seeds", 1), ("num_particles", 10), ("points", 11)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputTypeError(f"{name} must be a whole number, got {value!r}")
            if value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        if not 0.1 <= self.passes <= 100 or round(self.passes * 100) != self.passes * 100:
            raise InputError(
                "passes must lie between 0.1 and 100 and make whole batches of 10 rows (two "
                f"decimals), got {self.passes:g}"
            )

    def lengths(self, strategy: Strategy) -> list[float]:
        """Passes of the runs behind a curve: each point is a run of its own."""
        usual = WHOLE if strategy is Strategy.DEFAULT else LENGTHS
        return [*(p for p in usual if p < self.passes), self.passes]

    def runs(self) -> Iterator[tuple[Strategy, int, float]]:
        """Strategy, seed and passes of every run."""
        for strategy in self.strategies:
            for seed in range(self.seeds):
                for passes in self.lengths(strategy):
                    yield strategy, seed, passes

    @property
    def total(self) -> float:
        """Passes of all runs together."""
        return sum(passes for _, _, passes in self.runs())


@dataclass
class Result:
    """Scores of all runs, the truth, and the last estimates of the first seed."""

    settings: Settings
    grid: Grid
    truth: Known
    truth_mass: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    estimates: dict[Strategy, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0


def problem() -> Problem:
    """The model, as a user would write it."""

    def log_likelihood(theta: jax.Array, x: jax.Array) -> jax.Array:
        first = norm.logpdf(x, theta[0], SCALE)
        second = norm.logpdf(x, theta[0] + theta[1], SCALE)
        return jnp.logaddexp(first, second) - jnp.log(2.0)

    return pmd.Problem(
        log_prior=lambda theta: norm.logpdf(theta).sum(),
        log_likelihood=log_likelihood,
        sample_prior=lambda key: jax.random.normal(key, (2,)),
    )


def data(seed: int) -> np.ndarray:
    """Rows drawn from the model at theta = (1, -2)."""
    random = np.random.default_rng(seed)
    first = random.random(NUM_DATA) < 0.5
    means = np.where(first, THETA[0], THETA[0] + THETA[1])
    return (means + SCALE * random.standard_normal(NUM_DATA)).astype(np.float32)


def options(strategy: Strategy, num_particles: int) -> dict[str, Any]:
    """What `pmd.fit` is told; for the default, the number of particles and nothing else."""
    if strategy is Strategy.DEFAULT:
        return {"num_particles": num_particles}
    if strategy is Strategy.NEVER:
        return {"num_particles": num_particles, "rejuvenate": pmd.never(), "batch_size": BATCH}
    rule = pmd.densities.isotropic(c=WIDTH, power=0.5)
    kernel = {"density": pmd.densities.kernel(rule), "batch_size": BATCH}
    first, few = (max(2, num_particles * n // PARTICLES) for n in (FIRST, FEW))
    if strategy is Strategy.EVERY_STEP:
        growing = pmd.schedules.linear(first, num_particles)
        return {"num_particles": growing, "rejuvenate": pmd.every_step(), **kernel}
    counts = few, num_particles
    both = pmd.switch(pmd.every_step(), pmd.never(), after=SWITCH, num_particles=counts)
    return {"num_particles": num_particles, "rejuvenate": both, **kernel}


Report = Callable[[Strategy, float, float], Any]
"""Called along the way with a strategy, the passes of the run and the passes done in all."""


def run(settings: Settings, report: Report | None = None) -> Result:
    """Run every strategy from every seed, and score what comes out against the grid.

    Args:
        settings: what to run.
        report: called along the way, for a progress bar.

    Example:
        >>> from pmd.experiments.mixture import Settings, Strategy, run
        >>> settings = Settings(strategies=(Strategy.NEVER,), passes=0.2, points=61)
        >>> [row["visited"] for row in run(settings).rows if row["strategy"] == "never"]
        [200]
    """
    began = time.perf_counter()
    model, x = problem(), data(settings.data_seed)
    result = truth_of(settings, model, x)
    for seed in range(settings.seeds):
        result.rows.extend(floor(result, model, x, seed))
    done = 0.0
    for strategy, seed, passes in settings.runs():
        tell = partial(forward, report, strategy, passes, done)
        tell({"pass": 0.0})
        start = time.perf_counter()
        posterior = pmd.fit(
            model, x, passes=passes, seed=seed, progress=False, callback=tell,
            **options(strategy, settings.num_particles),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        if posterior.settings.get("stopped") == "interrupted":
            raise KeyboardInterrupt  # fit hands back what there is; here it would pass for a result
        scored = row(result, strategy, seed, passes, posterior)
        result.rows.append({**scored, "seconds": seconds})
        done += passes
    result.seconds = time.perf_counter() - began
    return result


def forward(
    report: Report | None, strategy: Strategy, passes: float, before: float, record: dict[str, Any]
) -> None:
    """A record of a run's history as progress of all runs."""
    if report is not None:
        report(strategy, passes, before + min(record["pass"], passes))


def left(grid: Grid) -> np.ndarray:
    """Where theta_2 < 0: one mode of the two."""
    return grid.points[:, 1] < 0


def truth_of(settings: Settings, model: Problem, x: np.ndarray) -> Result:
    """The true posterior, and room for the runs."""
    grid = Grid.square(HALF, settings.points)
    truth = known(grid, log_iterates(model, x, grid, np.ones((1, NUM_DATA)))[0])
    return Result(settings, grid, truth, grid.integral(np.exp(truth.log_density[left(grid)])))


def floor(result: Result, model: Problem, x: np.ndarray, seed: int) -> Iterator[dict[str, Any]]:
    """Scores of exact mirror descent along the batches of the runs, and with replacement."""
    settings, grid = result.settings, result.grid
    ends = {p for s in settings.strategies for p in settings.lengths(s)}
    even = np.linspace(EVERY, settings.passes, round(settings.passes / EVERY))
    steps = np.unique(np.round(np.r_[even, list(ends)] * NUM_DATA / BATCH).astype(int))
    stops = [int(step) * BATCH for step in steps]
    step_size = pmd.schedules.rows_visited()
    for name, replace in ((FLOOR, False), (FLOOR_REPLACE, True)):
        weights = row_weights(NUM_DATA, BATCH, step_size, stops, seed=seed, replace=replace)
        for stop, log_q in zip(stops, log_iterates(model, x, grid, weights), strict=True):
            iterate = known(grid, log_q).log_density
            mode = grid.integral(np.exp(iterate[left(grid)]))
            yield {
                "strategy": name,
                "seed": seed,
                "data_seed": settings.data_seed,
                "passes": stop / NUM_DATA,
                "visited": stop,
                **score(grid, result.truth, iterate)._asdict(),
                "mode_mass": mode,
                "mode_mass_error": abs(mode - result.truth_mass),
            }


def row(
    result: Result, strategy: Strategy, seed: int, passes: float, posterior: Posterior
) -> dict[str, Any]:
    """Scores of one run.

    Atoms (strategy 1, and the switch once it stays) have no density: theirs is scored as the paper
    scores samples, by a kernel estimate with 0.1 times the median distance as bandwidth; mode mass
    and mean are those of the weighted particles themselves.
    """
    grid, truth = result.grid, result.truth
    shown = posterior
    if posterior.atoms:
        median = pmd.densities.kernel(pmd.densities.median(0.1))
        shown = posterior.kernel_estimate(median)
    log_q = np.asarray(shown.log_prob(grid.points), float)
    p = np.exp(truth.log_density) * grid.cell
    centre = p @ grid.points
    sd = np.sqrt(p @ (grid.points - centre) ** 2)
    if posterior.atoms:
        mode = float(np.exp(posterior.log_weights)[posterior.theta[:, 1] < 0].sum())
    else:
        mode = grid.integral(np.exp(log_q[left(grid)]))
    if seed == 0:
        result.estimates[strategy] = log_q
    return {
        "strategy": str(strategy),
        "seed": seed,
        "data_seed": result.settings.data_seed,
        "passes": passes,
        "visited": [r["visited"] for r in posterior.history if r["kind"] == "step"][-1],
        "density": "kernel estimate of atoms" if posterior.atoms else "fitted",
        **score(grid, truth, log_q)._asdict(),
        "mode_mass": mode,
        "mode_mass_error": abs(mode - result.truth_mass),
        "mean_error": float(np.sqrt(np.mean(((posterior.mean() - centre) / sd) ** 2))),
        "log_evidence_error": posterior.log_evidence - truth.log_normaliser,
        "particles": posterior.num_particles,
        "ess": posterior.ess,
        "evaluations": posterior.evaluations,
        "verdict": posterior.certificate.verdict,
    }
