"""Sums of log-likelihoods over rows: blocks, masks, and accuracy in float32."""

import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets

import pmd
from pmd.likelihood import Blocks, Sums, compensated, sum_rows, weighted_rows, window


def logistic(dimension: int) -> pmd.Problem:
    return pmd.Problem(
        log_prior=lambda t: targets.log_normal(t).sum(),
        log_likelihood=lambda t, row: -jnp.logaddexp(0.0, -row[1] * (row[0] @ t)),
        sample_prior=lambda key: jax.random.normal(key, (dimension,)),
    )


def logistic_rows(n: int, dimension: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dimension), dtype=np.float32)
    p = 1 / (1 + np.exp(-x @ np.linspace(-1, 1, dimension)))
    return x, np.where(rng.uniform(size=n) < p, 1.0, -1.0).astype(np.float32)


def logistic_sums(theta: np.ndarray, rows: Any, weights: Any = 1.0) -> np.ndarray:
    """Weighted sums over rows in float64."""
    x, y = (np.asarray(a, float) for a in rows)
    return np.array([-(weights * np.logaddexp(0.0, -y * (x @ t))).sum() for t in theta])


def total(sums: Sums) -> np.ndarray:
    reference = float(sums.reference_sum) + float(sums.reference_rest)
    return np.asarray(sums.value, float) + reference


@pytest.mark.parametrize(("block", "particles"), [(16, 32), (64, 96), (256, 32)])
def test_blocks_make_the_dense_sum(block: int, particles: int, precision: float) -> None:
    """For blocks that do not divide the rows, and particles beyond `count` left out."""
    rows = jax.tree.map(jnp.asarray, logistic_rows(200, 3))
    flat = logistic(3).flat()
    theta = flat.sample(jax.random.key(0), jnp.arange(96))
    order = jnp.asarray(np.random.default_rng(1).permutation(200))
    start, size, weight = 30, 150, 2.5
    fetch, num = window(
        rows, order, jnp.asarray(start), jnp.asarray(size), jnp.asarray(weight), block
    )
    sums = sum_rows(flat, theta, jnp.asarray(70), theta[3], fetch, num, particles)
    chosen = jax.tree.map(lambda a: np.asarray(a)[np.asarray(order)[start : start + size]], rows)
    expected = logistic_sums(np.asarray(theta, float), chosen, weight)
    # 150 terms below 10, each with a handful of roundings, and their sum
    tolerance = 150 * weight * 10 * 4 * precision
    np.testing.assert_allclose(total(sums)[:70], expected[:70], atol=tolerance)
    assert int(sums.bad) == 0


def test_rows_by_number_with_weights_of_their_own(precision: float) -> None:
    rows = jax.tree.map(jnp.asarray, logistic_rows(100, 2))
    flat = logistic(2).flat()
    theta = flat.sample(jax.random.key(0), jnp.arange(32))
    rng = np.random.default_rng(2)
    index, weights = rng.permutation(100), rng.exponential(size=100)
    size = 37
    fetch, num = weighted_rows(
        rows, jnp.asarray(index), jnp.asarray(size), jnp.asarray(weights, theta.dtype), 16
    )
    sums = sum_rows(flat, theta, jnp.asarray(32), theta[0], fetch, num, 32)
    kept = np.zeros(100)
    kept[index[:size]] = weights[index[:size]]
    expected = logistic_sums(np.asarray(theta, float), rows, kept)
    np.testing.assert_allclose(total(sums), expected, atol=37 * 50 * 4 * precision)


def test_what_is_masked_does_not_matter() -> None:
    """Rows outside the window may hold anything, NaN too; so may particles that are not in use."""
    x, y = logistic_rows(64, 2)
    x[40:] = np.nan
    rows = jax.tree.map(jnp.asarray, (x, y))
    flat = logistic(2).flat()
    theta = flat.sample(jax.random.key(0), jnp.arange(64)).at[50:].set(jnp.nan)
    one = jnp.ones(())
    fetch, num = window(rows, jnp.arange(64), jnp.asarray(0), jnp.asarray(40), one, 64)
    sums = sum_rows(flat, theta, jnp.asarray(50), theta[0], fetch, num, 32)
    assert int(sums.bad) == 0
    expected = logistic_sums(np.asarray(theta, float)[:50], (x[:40], y[:40]))
    np.testing.assert_allclose(total(sums)[:50], expected, rtol=1e-5)


def poles(value: float) -> pmd.Problem:
    """A likelihood that takes `value` where row + theta is above one."""
    return pmd.Problem(
        log_prior=targets.log_normal,
        log_likelihood=lambda t, row: jnp.where(row + t > 1.0, value, -(row**2) * t),
        sample_prior=lambda key: jax.random.normal(key),
    )


@pytest.mark.parametrize(("value", "bad"), [(np.nan, True), (np.inf, True), (-np.inf, False)])
def test_nan_and_plus_infinity_are_counted_and_minus_infinity_is_legal(
    value: float, bad: bool
) -> None:
    flat = poles(value).flat()
    theta = jnp.linspace(-1.0, 1.0, 32)[:, None]
    rows = jnp.linspace(-0.5, 0.5, 40)
    fetch, num = window(rows, jnp.arange(40), jnp.asarray(0), jnp.asarray(40), jnp.ones(()), 16)
    for reference in (theta[0], theta[-1]):  # possible, impossible
        sums = sum_rows(flat, theta, jnp.asarray(32), reference, fetch, num, 32)
        assert (int(sums.bad) > 0) == bad
        impossible = np.asarray(theta)[:, 0] + 0.5 > 1.0
        assert (np.isneginf(np.asarray(sums.value)) == (impossible & (not bad))).all()
        fine = ~impossible
        expected = -(np.asarray(rows, float) ** 2).sum() * np.asarray(theta, float)[fine, 0]
        np.testing.assert_allclose(total(sums)[fine], expected, atol=1e-5)


def test_compensated_sum_keeps_what_rounding_loses() -> None:
    terms = np.random.default_rng(0).standard_normal(20000).astype(np.float32)
    terms[0] = 1e7

    def add(carry: Any, x: Any) -> Any:
        total, rest = carry
        return compensated(total, rest, x), None

    (kept, rest), _ = jax.lax.scan(add, (jnp.zeros(()), jnp.zeros(())), jnp.asarray(terms))
    # the rest is itself a float32 sum of 20,000 errors below half a unit in the last place, 0.5
    error = float(kept) + float(rest) - math.fsum(terms.astype(float))
    assert abs(error) < 20000 * 0.5 * 1.2e-7 * np.sqrt(20000)
    assert abs(float(np.cumsum(terms)[-1]) - math.fsum(terms.astype(float))) > 10 * abs(error)


ROWS = 1_600_000


def gaussian_rows() -> tuple[pmd.Problem, Any, np.ndarray, Any]:
    """Rows far from zero: unless a reference is taken off, their sum alone rounds to .1 nat."""
    x = (5.0 + np.random.default_rng(0).standard_normal(ROWS)).astype(np.float32)
    problem = targets.gaussian_mean(rows=2, noise=1.0).problem
    theta = (x.mean(dtype=float) + np.linspace(-3, 3, 32) / np.sqrt(ROWS)).astype(np.float32)
    x64 = x.astype(float)
    exact = [
        -0.5 * ((x64 - t) ** 2).sum() - 0.5 * ROWS * np.log(2 * np.pi) for t in theta.astype(float)
    ]
    return problem, x, theta[:, None], np.array(exact)


def many_logistic_rows() -> tuple[pmd.Problem, Any, np.ndarray, Any]:
    rows = logistic_rows(ROWS, 3)
    # The information about a coefficient is about .2 a row.
    apart = np.random.default_rng(1).standard_normal((32, 3)) / np.sqrt(0.2 * ROWS)
    theta = (np.linspace(-1, 1, 3) + apart).astype(np.float32)
    return logistic(3), rows, theta, logistic_sums(theta.astype(float), rows)


@pytest.mark.parametrize("make", [gaussian_rows, many_logistic_rows])
def test_differences_between_particles_at_many_rows(make: Any) -> None:
    """A hundredth of a nat at 1.6 million rows in float32, particles a posterior sd apart."""
    problem, rows, theta, exact = make()
    flat = problem.flat()
    rows = jax.tree.map(jnp.asarray, rows)
    blocks = Blocks.choose(len(theta), ROWS, ROWS)
    began = time.perf_counter()

    @jax.jit
    def sums(theta: Any, rows: Any) -> Sums:
        order, size = jnp.arange(ROWS), jnp.asarray(ROWS)
        fetch, num = window(rows, order, jnp.asarray(0), size, jnp.ones(()), blocks.rows)
        count = jnp.asarray(len(theta))
        return sum_rows(flat, theta, count, theta[5], fetch, num, blocks.particles)

    got = sums(jnp.asarray(theta), rows)
    assert got.value.dtype == jnp.float32
    assert np.ptp(exact) > 3  # there are differences to get right
    error = np.asarray(got.value, float) - (exact - exact[5])
    assert np.abs(error).max() < 0.01
    # and the reference's own sum, which the evidence needs
    assert abs(float(got.reference_sum) + float(got.reference_rest) - exact[5]) < 0.05
    assert time.perf_counter() - began < 15


def test_sizes_of_blocks() -> None:
    blocks = Blocks.choose(1500, 10, 1000)
    assert blocks.particles <= 4096
    assert blocks.capacity(1500) % blocks.particles == 0
    assert blocks.capacity(1500) >= 1500
    assert blocks.capacity(blocks.particles) == blocks.particles
    assert Blocks.choose(1, 1, 1) == Blocks(32, 1)
