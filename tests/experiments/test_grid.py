"""The grid's truth against closed forms, and exact mirror descent against formulas by hand."""

import jax
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

import pmd
from pmd.experiments import mixture
from pmd.experiments.grid import Grid, known, log_iterates, row_weights, score
from pmd.rows import Order
from pmd.schedules import constant, power, rows_visited

GRID = Grid.square(4.5, 91)


def tied_normal() -> pmd.Problem:
    """x ~ N(theta_1 + theta_2, 1), standard normal priors: a Gaussian posterior."""
    return pmd.Problem(
        log_prior=lambda theta: jax.scipy.stats.norm.logpdf(theta).sum(),
        log_likelihood=lambda theta, x: jax.scipy.stats.norm.logpdf(x, theta[0] + theta[1]),
        sample_prior=lambda key: jax.random.normal(key, (2,)),
    )


def log_joint(x: np.ndarray, points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The mixture's log prior and weighted log-likelihood, by SciPy, row after row."""
    total = norm.logpdf(points).sum(1)
    for value, weight in zip(x.astype(float), weights, strict=True):
        first = norm.logpdf(value, points[:, 0], 2.5)
        second = norm.logpdf(value, points[:, 0] + points[:, 1], 2.5)
        total += weight * (np.logaddexp(first, second) - np.log(2))
    return total


def test_the_truth_of_a_gaussian_is_its_closed_form() -> None:
    x = np.random.default_rng(0).normal(0.5, 1.0, 20).astype(np.float32)
    truth = known(GRID, log_iterates(tied_normal(), x, GRID, np.ones((1, 20)))[0])
    cov = np.linalg.inv(np.eye(2) + 20 * np.ones((2, 2)))
    mean = cov @ np.full(2, x.astype(float).sum())
    p = np.exp(truth.log_density) * GRID.cell
    np.testing.assert_allclose(p @ GRID.points, mean, atol=1e-6)
    # The sum over equally spaced points is exact to rounding for a smooth density that vanishes
    # at the borders; here the tail cut off at 4.5 prior sds is what remains.
    spread = np.eye(20) + 2 * np.ones((20, 20))
    evidence = -0.5 * (
        x @ np.linalg.solve(spread, x) + np.linalg.slogdet(spread)[1] + 20 * np.log(2 * np.pi)
    )
    assert truth.log_normaliser == pytest.approx(evidence, abs=1e-5)
    entropy = 0.5 * np.linalg.slogdet(2 * np.pi * np.e * cov)[1]
    assert truth.entropy == pytest.approx(entropy, abs=1e-4)


def test_the_mixture_on_the_grid_is_scipys() -> None:
    x = mixture.data(3)
    points = Grid.square(4.5, 19)
    weights = np.random.default_rng(0).random((2, mixture.NUM_DATA))
    found = log_iterates(mixture.problem(), x, points, weights)
    for row, c in zip(found, weights, strict=True):
        np.testing.assert_allclose(row, log_joint(x, points.points, c), rtol=1e-9)


def test_the_truth_does_not_change_with_a_finer_grid() -> None:
    coarse, fine = (
        mixture.truth_of(mixture.Settings(points=n), mixture.problem(), mixture.data(1))
        for n in (181, 271)
    )
    assert coarse.truth.log_normaliser == pytest.approx(fine.truth.log_normaliser, abs=1e-8)
    assert coarse.truth.entropy == pytest.approx(fine.truth.entropy, abs=1e-8)


def test_modes_have_half_the_mass_for_data_that_favour_none() -> None:
    """Data symmetric about zero have a posterior that theta -> -theta leaves as it is."""
    half = mixture.data(1)[:500]
    x = np.concatenate([half, -half])
    truth = mixture.truth_of(mixture.Settings(points=181), mixture.problem(), x)
    on_the_border = np.exp(truth.truth.log_density[truth.grid.points[:, 1] == 0]).sum()
    assert truth.truth_mass + on_the_border * truth.grid.cell / 2 == pytest.approx(0.5, abs=1e-9)


def test_scores_of_known_pairs() -> None:
    a, b = (known(GRID, norm.logpdf(GRID.points, [shift, 0.0]).sum(1)) for shift in (0.0, 0.5))
    same = score(GRID, a, a.log_density)
    assert (same.total_variation, same.kl) == pytest.approx((0, 0), abs=1e-12)
    assert same.cross_entropy == a.entropy == pytest.approx(np.log(2 * np.pi * np.e), abs=2e-3)
    other = score(GRID, a, b.log_density)
    assert other.kl == pytest.approx(0.5**2 / 2, abs=1e-3)
    assert other.total_variation == pytest.approx(2 * norm.cdf(0.25) - 1, abs=1e-3)


def test_one_full_batch_with_g_1_is_the_posterior() -> None:
    weights = row_weights(50, 50, constant(1.0), [50], seed=3)
    np.testing.assert_allclose(weights, np.ones((1, 50)))


def test_rows_count_alike_after_whole_passes_with_g_1_over_t() -> None:
    """With g = 1/t every batch so far has the same weight, N/(B t) a row."""
    weights = row_weights(60, 10, power(1.0, 0.0, 1.0), [30, 60, 120], seed=1)
    seen = Order(60, 1, False).of_pass(0)[:30]
    np.testing.assert_allclose(weights[0], np.where(np.isin(np.arange(60), seen), 2.0, 0.0))
    np.testing.assert_allclose(weights[1:], 1.0)


def test_weights_of_rows_follow_the_recursion_by_hand() -> None:
    """c_n = g_s N/B prod_{r > s} (1 - g_r), summed over the steps s whose batch holds row n."""
    n, size, c = 40, 10, 2.0
    found = row_weights(n, size, rows_visited(c), [120], seed=5, replace=True)[0]
    order = np.concatenate([Order(n, 5, True).of_pass(k) for k in range(3)]).reshape(-1, size)
    g = [c * size / (size * t + c * n) for t in range(12)]
    expected = np.zeros(n)
    for s, batch in enumerate(order):
        kept = np.prod([1 - g[r] for r in range(s + 1, 12)])
        expected += np.bincount(batch, minlength=n) * g[s] * n / size * kept
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_floor_at_the_end_is_its_own_formula() -> None:
    settings = mixture.Settings(strategies=(), passes=2.0, points=41)
    x, model = mixture.data(1), mixture.problem()
    result = mixture.truth_of(settings, model, x)
    rows = [r for r in mixture.floor(result, model, x, seed=0) if r["strategy"] == mixture.FLOOR]
    assert rows[-1]["visited"] == 2000
    c = row_weights(1000, 10, rows_visited(2.0), [2000], seed=0)[0]
    joint = log_joint(x, result.grid.points, c)
    q = np.exp(joint - logsumexp(joint)) / result.grid.cell
    p = np.exp(result.truth.log_density)
    expected = np.abs(q - p).sum() * result.grid.cell / 2
    assert rows[-1]["total_variation"] == pytest.approx(expected, rel=1e-6)
