"""What one device does: the hot loops by themselves, and a whole fit, in seconds.

    PYTHONPATH=src python benchmarks/device.py           # sizes for a GPU
    PYTHONPATH=src python benchmarks/device.py --small   # sizes for two cores

Needs nothing beyond jax, numpy and scipy.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, too

import pmd
from benchmarks import move
from pmd.exact import log_density, posterior_iterate
from pmd.likelihood import Blocks
from pmd.mirror import Steps, initial, stretch
from pmd.rows import Order


class Sizes(NamedTuple):
    """How large everything is."""

    rows: int = 1_600_000
    dimension: int = 50
    particles: int = 1000
    batch: int = 100
    passes: int = 5
    points: int = 65_536  # of the kernel mixture, and where it is evaluated
    moves: tuple[tuple[int, int], ...] = ((1500, 2), (1500, 6), (1500, 12), (1500, 20), (4000, 50))
    fit_rows: int = 11_769
    fit_particles: int = 4000


SMALL = Sizes(20_000, 50, 256, 100, 2, 4096, ((1500, 2), (1500, 6)), 2000, 2000)
Row = tuple[str, float, str]


def logistic(dimension: int) -> pmd.Problem:
    """Logistic regression with a standard normal prior."""
    return pmd.Problem(
        log_prior=lambda t: -0.5 * jnp.sum(t**2) - 0.5 * dimension * jnp.log(2 * jnp.pi),
        log_likelihood=lambda t, row: -jnp.logaddexp(0.0, -row[1] * (row[0] @ t)),
        sample_prior=lambda key: jax.random.normal(key, (dimension,)),
    )


def generated(rows: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Covariates of falling size, as principal components have, and labels of plus or minus 1."""
    random = np.random.default_rng(11)
    scale = np.linspace(2.5, 0.5, dimension, dtype=np.float32)
    x = random.standard_normal((rows, dimension), dtype=np.float32) * scale
    p = 1 / (1 + np.exp(-x @ (0.3 * random.standard_normal(dimension, dtype=np.float32))))
    return x, np.where(random.random(rows) < p, 1.0, -1.0).astype(np.float32)


def seconds(f: Callable[[], Any], times: int = 3) -> tuple[float, float]:
    """The first call, which compiles, and the best of some more."""
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        jax.block_until_ready(f())
        taken.append(time.perf_counter() - begin)
    return taken[0], min(taken[1:])


def steps(sizes: Sizes) -> Iterator[Row]:
    """Mirror steps at particles that stay where they are: the loop alone, and `pmd.fit`."""
    problem, rows = logistic(sizes.dimension), generated(sizes.rows, sizes.dimension)
    n, m = sizes.rows // sizes.batch, sizes.particles
    flat, blocks = problem.flat(), Blocks.choose(m, sizes.batch, sizes.rows)
    begin = time.perf_counter()
    data = jax.block_until_ready(jax.tree.map(jnp.asarray, rows))
    yield "rows to the device", time.perf_counter() - begin, "s"
    order, _ = Order(sizes.rows, 0, False).window(0)
    count = jnp.asarray(m, jnp.int32)
    state = initial(flat, jax.random.key(0), count, blocks.capacity(m), sizes.rows)
    start = jnp.arange(n, dtype=jnp.int32) * sizes.batch
    every = jnp.ones(n, jnp.int32)
    g = 2 * sizes.batch / (start.astype(jnp.float32) + 2 * sizes.rows)
    plan = Steps(start, sizes.batch * every, g, m * every)
    first, last, zero = jnp.asarray(0), jnp.asarray(n), jnp.zeros(())

    def one_pass() -> Any:
        return stretch(
            flat, blocks, state, data, order, plan, first, last, zero, zero,
            jax.random.key(1), None,
        )[0]  # fmt: skip

    compiled, best = seconds(one_pass)
    yield f"{n} steps, {m} particles, batches of {sizes.batch}: the loop", best, "s"
    yield "  a step", 1e6 * best / n, "us"
    yield "  compiling", compiled - best, "s"
    it = posterior_iterate(state)
    big = Blocks.choose(m, sizes.rows, sizes.rows)
    points = state.theta[:m]
    _, best = seconds(lambda: log_density(flat, big, it, data, points, count)[0])
    yield f"log-likelihood of {sizes.rows} rows at {m} particles", best, "s"
    yield "  row-particle pairs a second", sizes.rows * m / best / 1e9, "G"
    begin = time.perf_counter()
    posterior = pmd.fit(
        problem, rows, rejuvenate=pmd.never(), batch_size=sizes.batch, passes=sizes.passes,
        num_particles=m, progress=False,
    )  # fmt: skip
    taken = time.perf_counter() - begin
    yield f"pmd.fit, the same for {sizes.passes} passes", taken, "s"
    yield "  a step", 1e6 * taken / (sizes.passes * n), "us"
    yield from shares(posterior)


def shares(posterior: pmd.Posterior) -> Iterator[Row]:
    """Where a run's time went."""
    told = posterior.settings["seconds"]
    for name, value in told.items():
        if name != "all":
            yield f"  {name}", value, f"s ({100 * value / told['all']:.0f} %)"


def kernels(sizes: Sizes) -> Iterator[Row]:
    """The density of many points under a mixture with as many kernels."""
    n = sizes.points
    for d in (2, 10):
        random = np.random.default_rng(d)
        theta = jnp.asarray(random.standard_normal((n, d)), jnp.float32)
        equal = jnp.zeros(n, jnp.float32)
        fitted = pmd.densities.kernel().fit(jax.random.key(0), theta, equal, equal, num_draws=n)
        points = jnp.asarray(random.standard_normal((n, d)), jnp.float32)
        _, best = seconds(lambda fitted=fitted, points=points: fitted.log_prob(points))
        yield f"kernel log-density, {n} x {n} points in {d} dimensions", best, "s"
        yield "  pairs a second", n * n / best / 1e9, "G"


def whole(sizes: Sizes) -> Iterator[Row]:
    """A fit with the default plan, first with an empty and then with a warm compilation cache."""
    problem, rows = logistic(sizes.dimension), generated(sizes.fit_rows, sizes.dimension)
    for name in ("first", "second"):
        begin = time.perf_counter()
        posterior = pmd.fit(
            problem, rows, num_particles=sizes.fit_particles, progress=False, seed=1
        )
        taken = time.perf_counter() - begin
        yield f"pmd.fit, {sizes.fit_rows} rows, {sizes.dimension} dimensions, {name}", taken, "s"
        yield from shares(posterior)
        told = posterior.certificate
        yield "  likelihood evaluations", posterior.evaluations, f"({told.verdict})"
        yield "  Pareto k", told.pareto_k, ""


def moves(sizes: Sizes) -> Iterator[Row]:
    """Moves of the regression density with their parts, a line each (`benchmarks.move`)."""
    for particles, dimension in sizes.moves:
        move.report(move.near_gaussian, particles, dimension, 3)
    yield from ()


PARTS: dict[str, Callable[[Sizes], Iterator[Row]]] = {
    "steps": steps,
    "kernels": kernels,
    "moves": moves,
    "whole": whole,
}


def main() -> None:
    """Print every figure as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    for part in args.parts:
        for what, value, unit in PARTS[part](SMALL if args.small else Sizes()):
            print(f"{what:72} {value:12.4g} {unit}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
