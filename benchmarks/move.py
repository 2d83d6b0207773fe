"""What one move of `densities.regression()` costs, beside NumPy in the same run.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/move.py

One line a density: time of a whole fit with its draws (best of some), beside what it is measured
against: solving one positive definite system with as many unknowns as there are particles (LU and
Cholesky), in many dimensions the normal equations of a full quadratic. Then the parts' shares.
`first` is the first fit of that kind in the process, compilation included. Every fit starts from
nothing (`previous=None`). Needs nothing beyond jax, numpy and scipy.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from scipy.linalg import cho_factor, cho_solve

from pmd.densities import regression
from pmd.densities.surrogate import Regressed

PARTS = {
    "whiten": "whiten",
    "fit candidates": "attempt",
    "cluster": "fit_base",
    "fit the best": "finish",
    "draw, weigh": "draw_from",
}


class Cloud(NamedTuple):
    """Particles, log q at them, and what they were drawn from."""

    theta: np.ndarray
    log_q: np.ndarray
    log_p0: np.ndarray


def wide_draws(centre: np.ndarray, m: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draws from Gaussians of sd 1.3 around some centres, and their log-density."""
    d = centre.shape[1]
    z = centre[random.integers(len(centre), size=m)] + 1.3 * random.standard_normal((m, d))
    apart = ((z[:, None] - centre) ** 2).sum(2)
    log_p0 = np.logaddexp.reduce(-0.5 * apart / 1.69, axis=1) - np.log(len(centre))
    return z, apart, log_p0 - d * np.log(1.3 * np.sqrt(2 * np.pi))


def near_gaussian(m: int, d: int, random: np.random.Generator) -> Cloud:
    """A Gaussian with a cubic term and lighter tails."""
    z, _, log_p0 = wide_draws(np.zeros((1, d)), m, random)
    bend = 0.1 * (z[:, 0] ** 3 - 2 * z[:, 0] * (z**2).mean(1)) - 0.02 * (z**4).sum(1) / d
    mix = np.eye(d) + 0.3 * random.standard_normal((d, d)) / np.sqrt(d)
    return Cloud(z @ mix, -0.5 * (z**2).sum(1) + bend, log_p0 - np.linalg.slogdet(mix)[1])


def curved(m: int, d: int, random: np.random.Generator) -> Cloud:
    """No polynomial of fourth degree: one coordinate has heavy tails, and bends another one."""
    z, _, log_p0 = wide_draws(np.zeros((1, d)), m, random)
    heavy = 0.5 * z[:, 0] ** 2 - 2.5 * np.log1p(z[:, 0] ** 2 / 4)
    return Cloud(z, -0.5 * (z**2).sum(1) + heavy - np.sin(2 * z[:, -1]) * z[:, 0] / 4, log_p0)


def modes(m: int, d: int, random: np.random.Generator) -> Cloud:
    """Three modes, apart."""
    centre = np.zeros((3, d))
    centre[1, 0], centre[2, 1] = 6.0, 6.0
    z, apart, log_p0 = wide_draws(centre, m, random)
    return Cloud(z, np.logaddexp.reduce(-0.5 * apart + np.log([0.5, 0.3, 0.2]), axis=1), log_p0)


def seconds(function: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs; CPU seconds where there is nothing else, to be left alone."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    times = []
    for _ in range(repeats):
        begin = clock()
        jax.block_until_ready(function())
        times.append(clock() - begin)
    return min(times)


def reference(m: int, d: int, repeats: int) -> dict[str, float]:
    """NumPy's and SciPy's time for the linear algebra that a move is measured against."""
    random = np.random.default_rng(0)
    if (d + 1) * (d + 2) // 2 > 500:
        features = random.standard_normal((m, (d + 1) * (d + 2) // 2))
        return {"normal equations": seconds(lambda: features.T @ features, repeats)}
    x = random.standard_normal((m, m))
    matrix, y = x @ x.T + m * np.eye(m), x[0]
    by_cholesky = lambda: cho_solve(cho_factor(matrix, lower=True, check_finite=False), y)  # noqa: E731
    return {
        "LU": seconds(lambda: np.linalg.solve(matrix, y), repeats),
        "Cholesky": seconds(by_cholesky, repeats),
    }


def shares(fit: Callable[[], Regressed]) -> str:
    """Where the time of one fit goes, by parts (those inside others are counted twice)."""
    profile = cProfile.Profile()
    profile.runcall(fit)
    found = pstats.Stats(profile).get_stats_profile().func_profiles
    times = {name: part.cumtime for name, part in found.items()}
    whole = times["fit"]
    return ", ".join(f"{k} {times[v] / whole:.0%}" for k, v in PARTS.items() if v in times)


def report(kind: Callable[..., Cloud], m: int, d: int, repeats: int) -> None:
    """One line."""
    cloud = kind(m, d, np.random.default_rng(d))
    log_w = cloud.log_q - cloud.log_p0
    keys = iter(jax.random.split(jax.random.key(0), repeats + 2))

    def fit() -> Regressed:
        return regression().fit(next(keys), cloud.theta, cloud.log_q, log_w, num_draws=m)

    first, best = seconds(fit, 1), seconds(fit, repeats)
    beside = reference(m, d, repeats)
    against = ", ".join(f"{best / t:.2f} x {k} ({1e3 * t:.0f} ms)" for k, t in beside.items())
    fitted = []
    parts = shares(lambda: fitted.append(fit()))
    what = f"{fitted[0].name}, error {fitted[0].error:.2g}, ESS {fitted[0].ess:.2f}"
    print(f"{kind.__name__:14s} d {d:3d}, m {m}: {1e3 * best:6.1f} ms = {against};", end=" ")
    print(f"first {first:.1f} s; {what}; {parts}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dimensions", type=int, nargs="+", default=[2, 6, 12, 20])
    parser.add_argument("--particles", type=int, default=1500)
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    for dimension in arguments.dimensions:
        for density in (near_gaussian, curved, modes):
            report(density, arguments.particles, dimension, arguments.repeats)
    report(near_gaussian, 4000, 50, arguments.repeats)
