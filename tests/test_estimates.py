"""The two estimates of an expectation, against closed forms and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pmd.errors import InputError, InputTypeError
from pmd.estimates import (
    Function,
    Points,
    combine,
    expectation,
    importance,
    moments,
    prediction,
    quantiles,
    systematic,
)


def log_normal(x: np.ndarray, mean: float, sd: float) -> np.ndarray:
    return -0.5 * ((x - mean) / sd) ** 2 - np.log(sd)


def standard_normal(seed: int, m: int = 400, shift: float = 0.2, error: float = 0.0) -> Points:
    """N(0, 1) by particles from N(0, 1.3^2), and draws of a density that is off by `shift`."""
    rng = np.random.default_rng(seed)
    theta, draws = 1.3 * rng.standard_normal((m, 1)), 1.2 * rng.standard_normal((4000, 1)) + shift
    p0, sd = log_normal(theta, 0, 1.3), 1.05
    w = importance((log_normal(theta, 0, 1) - p0)[:, 0])
    v = importance((log_normal(theta, shift, sd) - p0)[:, 0])
    u = importance((log_normal(draws, shift, sd) - log_normal(draws, shift, 1.2))[:, 0])
    return Points(theta, w, draws, u, v, error)


def mean_and_square(points: Points, using: str | None):
    both = lambda x: [np.concatenate([x, x**2], axis=1)]  # noqa: E731
    return combine(both(points.theta), lambda: both(points.draws), points, using)


@pytest.mark.parametrize("using", ["particles", "density"])
def test_both_estimates_are_unbiased_and_know_their_error(using: str) -> None:
    repeats = 400
    found = [mean_and_square(standard_normal(seed), using) for seed in range(repeats)]
    values = np.array([estimate.value for estimate in found])
    errors = np.array([estimate.standard_error for estimate in found])
    spread = values.std(0)
    # Self-normalised weights have a bias of order 1 / m; the mean of the repeats has this error:
    assert (np.abs(values.mean(0) - [0, 1]) < 4 * spread / np.sqrt(repeats) + 1 / 400).all()
    # An sd from 400 repeats is known to 1 / sqrt(800) = 3.5 %, somewhat worse for the square.
    assert np.allclose(np.sqrt((errors**2).mean(0)), spread, rtol=0.15)


def test_a_good_density_gives_the_smaller_error() -> None:
    alone = np.array([mean_and_square(standard_normal(s), "particles").value for s in range(100)])
    both = np.array([mean_and_square(standard_normal(s), "density").value for s in range(100)])
    assert (both.std(0) < 0.6 * alone.std(0)).all()


def test_the_smaller_estimated_variance_decides() -> None:
    assert mean_and_square(standard_normal(0), None).using == "density"
    far = standard_normal(0, shift=1.5)
    assert mean_and_square(far, None).using == "particles"
    assert mean_and_square(far, "density").using == "density"


def test_a_held_out_error_of_a_nat_is_not_believed() -> None:
    # The density fits its own particles exactly (delta = 0), and is off elsewhere.
    points = standard_normal(0, shift=0.0)
    points = Points(points.theta, points.w, points.draws, points.u, points.w, error=1.0)
    assert mean_and_square(points, None).using == "particles"
    small = Points(points.theta, points.w, points.draws, points.u, points.w, error=0.1)
    assert mean_and_square(small, None).using == "density"


def test_an_unmeasured_density_is_not_used_unasked() -> None:
    points = standard_normal(0, error=np.nan)
    assert mean_and_square(points, None).using == "particles"
    assert mean_and_square(points, "density").using == "density"


def test_infinite_values_of_zero_weight_do_not_count() -> None:
    theta = np.array([[1.0], [-1.0], [3.0]])
    points = Points(theta, np.array([0.5, 0.0, 0.5]))
    found = expectation(lambda t: jnp.log(t[0]), lambda v: v, points)
    assert np.isclose(found.value, 0.5 * np.log(3), rtol=1e-6)


def test_a_function_infinite_at_the_draws_is_taken_from_the_particles() -> None:
    points = standard_normal(0)
    draws = points.draws.copy()
    draws[0] = 400.0
    wild = Points(points.theta, points.w, draws, points.u, points.v, 0.0)
    found = expectation(lambda t: jnp.exp(t[0]), lambda v: v, wild)
    assert found.using == "particles"
    assert np.isfinite(found.value)


def test_expectation_keeps_the_structure_and_digits() -> None:
    theta = 1e4 + np.random.default_rng(0).standard_normal((700, 3))
    points = Points(theta, np.full(700, 1 / 700))
    found = expectation(lambda t: {"a": t.sum(), "b": (t[:2] > 1e4,)}, lambda v: v, points)
    single = theta.astype(np.float32).astype(float)
    assert np.isclose(found.value["a"], single.sum(1).mean(), rtol=1e-7)
    assert np.isclose(found.sd["a"], single.sum(1).std(), rtol=1e-3)
    assert np.allclose(found.value["b"][0], (single[:, :2] > 1e4).mean(0))


def test_blocks_keep_wide_functions_small() -> None:
    wide = np.zeros((200_000, 2), np.float32)
    theta = np.ones((5000, 2))
    inner = jax.jit(lambda t: jnp.mean(wide @ t))  # its width hides in a function called
    assert Function(lambda t: inner(t), lambda v: v, theta).rows * 200_000 <= 2**23
    assert Function(lambda t: t.sum(), lambda v: v, theta).rows == 4096
    assert Function(lambda t: t.sum(), lambda v: v, theta[:5]).rows == 8


@pytest.mark.parametrize("f", [lambda t: None, lambda t: t * 1j])
def test_functions_must_return_real_numbers(f) -> None:
    with pytest.raises(InputTypeError, match="real numbers"):
        expectation(f, lambda v: v, Points(np.ones((3, 1)), np.full(3, 1 / 3)))


def test_prediction_for_every_row_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pmd.estimates.MOST_ROWS", 64)
    rng = np.random.default_rng(0)
    theta, w = rng.standard_normal((500, 2)), importance(rng.standard_normal(500))
    rows = (rng.standard_normal((150, 2)), rng.standard_normal(150))
    found = prediction(lambda t, row: row[0] @ t + row[1], rows, lambda v: v, Points(theta, w))
    values = theta @ rows[0].T + rows[1]
    assert np.allclose(found.value, w @ values, atol=1e-5)
    assert np.allclose(found.sd, np.sqrt(w @ (values - w @ values) ** 2), rtol=1e-3)
    with pytest.raises(InputError, match="same, non-empty leading axis"):
        prediction(lambda t, row: row[1], (rows[0], rows[1][:3]), lambda v: v, Points(theta, w))


def test_moments_of_weighted_numbers() -> None:
    rng = np.random.default_rng(0)
    x, w = 1e3 + rng.standard_normal((300, 2)), importance(rng.standard_normal(300))
    found = moments(x, lambda: x, Points(x, w), None)
    assert np.allclose(found.value, w @ x, rtol=1e-12)
    assert np.allclose(found.sd, np.sqrt(w @ (x - w @ x) ** 2), rtol=1e-9)
    constant = moments(np.ones((4, 1)), lambda: x, Points(np.ones((4, 1)), np.full(4, 0.25)), None)
    assert constant.sd == 0


def test_quantiles_of_equal_weights_are_those_of_numpy() -> None:
    x = np.random.default_rng(0).standard_normal((200, 2))
    q = np.array([0.0, 0.05, 0.5, 0.99])
    expected = np.quantile(x, q, axis=0, method="hazen")
    assert np.allclose(quantiles(x, np.full(200, 1 / 200), q), expected)


def test_quantiles_of_weights_some_of_them_negative() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(500), rng.standard_normal(8000)])[:, None]
    change = 0.3 * rng.standard_normal(500) / 500
    weights = np.concatenate([change - change.mean(), np.full(8000, 1 / 8000)])
    q = np.linspace(0.02, 0.98, 49)
    found = quantiles(x, weights, q)[:, 0]
    assert (np.diff(found) >= 0).all()
    # The distribution function at the median: its error from 8000 draws, and that of the weights.
    sd = np.sqrt(0.25 / 8000 + 0.25 * (change @ change))
    assert abs(found[24]) < 4 * sd / 0.3989
    weights[:] = 0
    weights[3] = 1
    assert np.allclose(quantiles(x, weights, q), x[3])


def test_systematic_resampling_takes_every_weight_to_within_one() -> None:
    rng = np.random.default_rng(0)
    w = importance(rng.standard_normal(300))
    w[17] = 0
    w /= w.sum()
    number = np.bincount(systematic(w, 1000, rng), minlength=300)
    assert (np.abs(number - 1000 * w) < 1 + 1e-9).all()
    assert number[17] == 0
