"""Log-density of a kernel mixture in blocks, beside the dense sum and SciPy, in the same run.

    python benchmarks/kernel_density.py

Times are the best of some rounds in which all contestants take turns, float32, n points under n
kernels. The dense sum is one jitted expression with the n x n matrix in it. SciPy's
`gaussian_kde` is timed in 2 dimensions at 8192 x 8192, its density and its log-density. Memory is
measured in a fresh process: how far the peak (ru_maxrss) rises while 20,000 points are evaluated
under 20,000 kernels in 10 dimensions, compilation included, the arrays themselves not.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from pmd import densities

SIZES = (256, 512, 1024, 2048, 4096, 8192)
KILOBYTE = 1024 if sys.platform != "darwin" else 1  # the unit of ru_maxrss, in bytes


@jax.jit
def dense(centre: Array, log_weight: Array, chol: Array, x: Array) -> Array:
    """The same log-density with every pair at once."""
    d = x.shape[1]
    inverse = jnp.linalg.inv(chol)
    middle = jnp.mean(centre, axis=0)
    a, b = (x - middle) @ inverse.T, (centre - middle) @ inverse.T
    squares = jnp.sum(a * a, 1)[:, None] + jnp.sum(b * b, 1) - 2 * a @ b.T
    level = log_weight - jnp.sum(jnp.log(jnp.diag(chol))) - 0.5 * d * np.log(2 * np.pi)
    return logsumexp(level - 0.5 * jnp.maximum(squares, 0), axis=1)


def cloud(n: int, d: int, seed: int) -> Array:
    """Standard normal points."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, d)), jnp.float32)


def fitted(rule: Any, n: int, d: int) -> Any:
    """A kernel mixture on n standard normal particles of equal weight."""
    zero = jnp.zeros(n)
    return densities.kernel(rule).fit(jax.random.key(0), cloud(n, d, 0), zero, zero)


def race(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Best time of each in milliseconds, all taking turns."""
    for run in contestants.values():
        jax.block_until_ready(run())
    best = dict.fromkeys(contestants, np.inf)
    for _ in range(rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            best[name] = min(best[name], 1e3 * (time.perf_counter() - began))
    return best


def compare(n: int, d: int, rounds: int) -> dict[str, float]:
    """Blocked, with one and with several bandwidths, and dense, n x n in d dimensions."""
    x, one = cloud(n, d, 1), fitted(densities.scott(), n, d)
    several = fitted(densities.local(), n, d)
    return race(
        {
            "scott": lambda: one.log_prob(x),
            "local": lambda: several.log_prob(x),
            "dense": lambda: dense(one.centre, one.log_weight, one.chol[0], x),
        },
        max(rounds, rounds * 2048 // n),
    )


def speed(d: int, rounds: int) -> None:
    """Blocked beside dense at all sizes."""
    print(f"\n{d} dimensions, float32: milliseconds")
    print(f"{'n':>6}{'scott':>10}{'local':>10}{'dense':>10}{'dense/scott':>13}")
    for n in SIZES:
        best = compare(n, d, rounds)
        print(f"{n:>6}" + "".join(f"{took:>10.3f}" for took in best.values()), end="")
        print(f"{best['dense'] / best['scott']:>13.2f}", flush=True)


def beside_scipy(rounds: int) -> None:
    """8192 x 8192 in two dimensions."""
    from scipy.stats import gaussian_kde

    n, x = 8192, cloud(8192, 2, 1)
    kde, points = gaussian_kde(np.asarray(cloud(n, 2, 0)).T), np.asarray(x).T
    mix = fitted(densities.scott(), n, 2)
    best = race(
        {
            "blocked": lambda: mix.log_prob(x),
            "scipy density": lambda: kde(points),
            "scipy log-density": lambda: kde.logpdf(points),
        },
        rounds,
    )
    print(f"\n{n} x {n} in 2 dimensions, float32: milliseconds")
    for name, took in best.items():
        print(f"{name:>18}{took:>10.1f}{took / best['blocked']:>8.1f} x blocked")


def peak() -> float:
    """Peak memory of this process in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KILOBYTE / 1e6


def memory(n: int, d: int) -> None:
    """How far the peak rises in one evaluation."""
    mix, x = fitted(densities.scott(), n, d), cloud(n, d, 1)
    jax.block_until_ready((mix, x))
    before = peak()
    jax.block_until_ready(mix.log_prob(x))
    print(f"{n} points, {n} kernels, {d} dimensions: peak {peak() - before:.0f} MB above", end=" ")
    print(f"{before:.0f} MB (the matrix of pairs has {4 * n * n / 1e6:.0f} MB)")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dimensions", type=int, nargs="*", default=[2, 10])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="only the memory, in this process")
    options = parser.parse_args()
    if options.memory:
        memory(20_000, 10)
        return
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    # First of all, as a process starts with the peak of the one that started it.
    subprocess.run([sys.executable, __file__, "--memory"], check=True)
    for d in options.dimensions:
        speed(d, options.rounds)
    beside_scipy(options.rounds)


if __name__ == "__main__":
    main()
