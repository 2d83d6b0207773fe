"""Densities by a small Gaussian mixture: closed forms, masses, what is meant and what is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pmd import densities
from pmd.errors import InputError

KEY = jax.random.key(0)
MEANS, SDS, SHARES = np.array([[-3.0, 0.0], [3.0, 2.0]]), np.array([0.5, 1.0]), np.array([0.3, 0.7])


def normal(n: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Draws from N(0, diag(1, 9)) and their log-density up to a constant."""
    theta = np.random.default_rng(0).normal(size=(n, 2)) * [1, 3]
    return theta, -0.5 * (theta**2 / [1, 9]).sum(1)


def log_truth(theta: np.ndarray) -> np.ndarray:
    """Log-density of an asymmetric mixture of two round Gaussians."""
    squares = ((theta[:, None] - MEANS) ** 2).sum(2) / SDS**2
    return np.log((SHARES / (2 * np.pi * SDS**2) * np.exp(-0.5 * squares)).sum(1))


def two_modes(n: int = 500) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Particles from half as much of the one as of the other mode, log q and log-weights."""
    rng = np.random.default_rng(1)
    which = rng.choice(2, n)
    theta = MEANS[which] + SDS[which, None] * rng.normal(size=(n, 2))
    parts = ((theta[:, None] - MEANS) ** 2).sum(2) / SDS**2
    log_p0 = np.log((0.5 / (2 * np.pi * SDS**2) * np.exp(-0.5 * parts)).sum(1))
    return theta, log_truth(theta), log_truth(theta) - log_p0


def test_a_normal_cloud_gives_its_moments(precision: float) -> None:
    theta, log_q = normal()
    fitted = densities.gaussian().fit(KEY, theta, log_q, np.zeros(500))
    assert (fitted.name, fitted.num_components) == ("mixture", 1)
    np.testing.assert_allclose(fitted.meant.mean[0], theta.mean(0), atol=1e-5)
    cov = np.asarray(fitted.meant.chol[0] @ fitted.meant.chol[0].T)
    np.testing.assert_allclose(cov, np.cov(theta.T, ddof=0), rtol=1e-4)
    # log q - log mix has five coefficients with errors of order 1 / sqrt(n): sd sqrt(5 / 2n).
    assert fitted.error < 3 * np.sqrt(5 / 1000)


def test_weighted_modes_get_their_masses_and_the_density_integrates_to_one() -> None:
    theta, log_q, log_w = two_modes()
    fitted = densities.gaussian().fit(KEY, theta, log_q, log_w)
    assert fitted.num_components == 2
    order = np.argsort(np.asarray(fitted.meant.mean)[:, 0])
    w = np.exp(log_w)
    # Standard error of a ratio of weighted sums: sqrt(sum w^2 (1 - pi)^2 over mode) / sum w.
    error = np.sqrt((w**2 * np.where(theta[:, 0] < 0, 0.7, 0.3) ** 2).sum()) / w.sum()
    np.testing.assert_allclose(np.exp(fitted.meant.log_pi)[order], SHARES, atol=4 * error)
    side = np.linspace(-10, 12, 201)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    np.testing.assert_allclose(np.exp(fitted.log_prob(grid)).sum() * 0.11**2, 1, atol=1e-3)


def test_draws_are_of_what_is_meant_unless_wide() -> None:
    theta, log_q, log_w = two_modes()
    n = 4096
    fitted = densities.gaussian().fit(KEY, theta, log_q, log_w)
    draws = fitted.draw(KEY, n)
    np.testing.assert_array_equal(draws.log_f, draws.log_q)
    np.testing.assert_allclose(draws.log_q, fitted.log_prob(draws.theta), rtol=1e-5)
    pi, mean = np.exp(fitted.meant.log_pi), np.asarray(fitted.meant.mean)
    sd = np.asarray(draws.theta).std(0)
    assert (np.abs(np.asarray(draws.theta).mean(0) - pi @ mean) < 4 * sd / np.sqrt(n)).all()
    wide = densities.gaussian(wide=0.1).fit(KEY, theta, log_q, log_w)
    draws = wide.draw(KEY, n)
    np.testing.assert_allclose(draws.log_q, fitted.log_prob(draws.theta), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(draws.log_f, wide.log_proposal(draws.theta), rtol=1e-4, atol=1e-4)
    weight = np.exp(np.asarray(draws.log_q - draws.log_f, float))
    assert weight.max() < 2.5  # f is wider everywhere
    assert abs(weight.mean() - 1) < 4 * weight.std() / np.sqrt(n)


def test_the_error_says_where_a_mixture_is_wrong() -> None:
    theta, log_q, log_w = two_modes()
    good = densities.gaussian().fit(KEY, theta, log_q, log_w)
    one = densities.gaussian(max_components=1).fit(KEY, theta, log_q, log_w)
    assert one.num_components == 1
    assert good.error < 0.2 < 0.5 < one.error
    # Deep in the tail nothing is asked of it.
    theta, log_q = normal()
    deep = np.where(log_q < -12, log_q - 100, log_q)
    fitted = densities.gaussian().fit(KEY, theta, deep, np.zeros(500))
    assert fitted.error < 0.25


def test_rows_without_weight_do_not_matter() -> None:
    theta, log_q, log_w = two_modes()
    fitted = densities.gaussian().fit(KEY, theta, log_q, log_w)
    more = np.vstack([theta, np.full((12, 2), 1e6)])
    nothing = np.full(12, -np.inf)
    same = densities.gaussian().fit(KEY, more, np.append(log_q, nothing), np.append(log_w, nothing))
    np.testing.assert_allclose(same.log_prob(theta), fitted.log_prob(theta), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(same.error, fitted.error, rtol=1e-2)


def test_the_last_fit_is_a_start() -> None:
    theta, log_q, log_w = two_modes()
    first = densities.gaussian().fit(KEY, theta, log_q, log_w)
    again = densities.gaussian().fit(jax.random.key(5), theta, log_q, log_w, previous=first)
    np.testing.assert_allclose(again.log_prob(theta), first.log_prob(theta), atol=0.05)


def test_packed_and_back() -> None:
    theta, log_q, log_w = two_modes()
    fitted = densities.gaussian(wide=0.1).fit(KEY, theta, log_q, log_w)
    again = densities.unpack(fitted.pack())
    np.testing.assert_array_equal(again.log_prob(theta), fitted.log_prob(theta))
    np.testing.assert_array_equal(again.draw(KEY, 8).theta, fitted.draw(KEY, 8).theta)
    assert again.error == pytest.approx(fitted.error)


@pytest.mark.parametrize(
    "cloud", [np.zeros((30, 2)), np.ones((2, 2)), np.eye(2)[[0] * 30 + [1] * 30]]
)
def test_degenerate_clouds_are_no_nan(cloud: np.ndarray) -> None:
    fitted = densities.gaussian(wide=0.1).fit(
        KEY, cloud, np.zeros(len(cloud)), np.zeros(len(cloud))
    )
    draws = fitted.draw(KEY, 8)
    assert all(bool(jnp.isfinite(part).all()) for part in draws)
    assert np.isfinite(fitted.error)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="max_components"):
        densities.gaussian(max_components=0)
    with pytest.raises(InputError, match="wide"):
        densities.gaussian(wide=1.0)
