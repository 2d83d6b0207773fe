"""A problem over flat vectors: values, order of axes, one matrix product, constraints, start."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets
from numpyro import distributions as dist
from numpyro.distributions import constraints as on
from scipy import stats

import pmd
from pmd.likelihood import sum_rows, window

ROWS, PARTICLES, DIMENSION = 48, 32, 5


def regression_problem(**changes: Any) -> pmd.Problem:
    """Logistic regression over a nested parameter, with everything but the constraints."""

    def log_likelihood(t: Any, row: Any) -> Any:
        x, y = row
        return -jnp.logaddexp(0.0, -y * (x @ t["slope"] + t["rest"][0]))

    given: dict[str, Any] = {
        "log_prior": lambda t: (
            targets.log_normal(t["slope"]).sum() + targets.log_normal(t["rest"][0])
        ),
        "log_likelihood": log_likelihood,
        "sample_prior": lambda key: {
            "slope": jax.random.normal(key, (DIMENSION,)),
            "rest": (jax.random.normal(jax.random.fold_in(key, 1)),),
        },
    }
    return pmd.Problem(**(given | changes))


def some_rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, DIMENSION)).astype(np.float32)
    return x, np.sign(rng.standard_normal(ROWS)).astype(np.float32)


def by_hand(theta: np.ndarray, rows: Any) -> np.ndarray:
    """The log-likelihoods in float64; the leaves of a dict are laid out in sorted order."""
    x, y = (np.asarray(a, float) for a in rows)
    logits = x @ theta[:, 1:].T + theta[:, 0]
    return -np.logaddexp(0.0, -y[:, None] * logits)


def test_likelihood_is_one_value_a_row_and_particle(precision: float) -> None:
    flat = regression_problem().flat()
    theta = flat.sample(jax.random.key(0), jnp.arange(PARTICLES))
    values = flat.log_likelihood(theta, jax.tree.map(jnp.asarray, some_rows()))
    assert flat.structure.names == ["rest.0", *(f"slope[{i}]" for i in range(DIMENSION))]
    assert values.shape == (ROWS, PARTICLES)
    assert values.dtype == theta.dtype
    # A logit is a sum of DIMENSION + 1 products of numbers below 4, each rounded.
    exact = by_hand(np.asarray(theta, float), some_rows())
    np.testing.assert_allclose(values, exact, atol=16 * (DIMENSION + 1) * precision)


def test_prior_and_its_draws() -> None:
    flat = regression_problem().flat()
    theta = np.asarray(flat.sample(jax.random.key(3), jnp.arange(4000)))
    prior = stats.norm.logpdf(theta).sum(axis=1)
    np.testing.assert_allclose(flat.log_prior(jnp.asarray(theta)), prior, atol=1e-5)
    assert flat.log_start is flat.log_prior
    # 4000 independent standard normals: means within 4.5 / sqrt(4000), six of them
    assert np.abs(theta.mean(axis=0)).max() < 4.5 / np.sqrt(4000)
    assert np.abs(np.cov(theta.T) - np.eye(6)).max() < 4.5 * np.sqrt(2 / 4000)


def test_a_draw_depends_on_its_number_alone() -> None:
    flat = regression_problem().flat()
    key = jax.random.key(1)
    many = flat.sample(key, jnp.arange(64))
    some = flat.sample(key, jnp.asarray([5, 17, 2]))
    np.testing.assert_array_equal(some, many[jnp.asarray([5, 17, 2])])


def test_batch_likelihood_gives_the_same() -> None:
    def whole(t: Any, rows: Any) -> Any:
        x, y = rows
        return -jnp.logaddexp(0.0, -y * (x @ t["slope"] + t["rest"][0]))

    rows = jax.tree.map(jnp.asarray, some_rows())
    one = regression_problem().flat()
    other = regression_problem(log_likelihood=None, log_likelihood_batch=whole).flat()
    theta = one.sample(jax.random.key(0), jnp.arange(PARTICLES))
    expected, got = one.log_likelihood(theta, rows), other.log_likelihood(theta, rows)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    other.check_likelihood(rows)


def products(text: str) -> list[str]:
    """Shapes of the results of the matrix products in lowered code."""
    return re.findall(r"stablehlo\.dot_general.*-> tensor<([0-9x]+)xf32>", text)


def test_rows_times_parameter_is_one_matrix_product() -> None:
    flat = regression_problem().flat()
    theta = jnp.zeros((PARTICLES, DIMENSION + 1))
    rows = jax.tree.map(jnp.asarray, some_rows())
    found = products(jax.jit(flat.log_likelihood).lower(theta, rows).as_text())
    assert found in ([f"{ROWS}x{PARTICLES}"], [f"{PARTICLES}x{ROWS}"])


def test_the_sum_over_rows_holds_one_such_product() -> None:
    """In the compiled loop: one product of a block of rows and particles, one for the reference."""
    flat = regression_problem().flat()
    block = 16

    def total(theta: Any, rows: Any) -> Any:
        order, size = jnp.arange(ROWS), jnp.asarray(ROWS)
        fetch, num = window(rows, order, jnp.asarray(0), size, jnp.ones(()), block)
        return sum_rows(flat, theta, jnp.asarray(64), theta[0], fetch, num, PARTICLES).value

    theta = jnp.zeros((64, DIMENSION + 1))
    lowered = jax.jit(total).lower(theta, jax.tree.map(jnp.asarray, some_rows()))
    found = sorted(
        tuple(sorted(map(int, shape.split("x")))) for shape in products(lowered.as_text())
    )
    assert found == [(1, block), (block, PARTICLES)]


def test_start_other_than_the_prior() -> None:
    start = (lambda key: 2.0 + jax.random.normal(key), lambda t: targets.log_normal(t - 2.0))
    target = targets.gaussian_mean().problem
    problem = pmd.Problem(target.log_prior, target.log_likelihood, target.sample_prior, start=start)
    flat = problem.flat()
    theta = flat.sample(jax.random.key(0), jnp.arange(2000))
    assert abs(float(theta.mean()) - 2) < 4.5 / np.sqrt(2000)
    log_start = stats.norm.logpdf(np.asarray(theta)[:, 0], 2.0)
    np.testing.assert_allclose(flat.log_start(theta), log_start, atol=1e-5)
    prior = stats.norm.logpdf(np.asarray(theta)[:, 0], 0.0, 3.0)
    np.testing.assert_allclose(flat.log_prior(theta), prior, atol=1e-5)


def test_the_flat_view_is_kept_for_each_precision() -> None:
    problem = regression_problem()
    single = problem.flat()
    assert problem.flat() is single
    with jax.enable_x64(True):
        double = problem.flat()
        assert double is not single
        assert double.sample(jax.random.key(0), jnp.arange(3)).dtype == jnp.float64
    assert problem.flat().sample(jax.random.key(0), jnp.arange(3)).dtype == jnp.float32


# ------------------------------------------------------------------ constraints


def constrained(constraint: Any, density: Any, shape: tuple[int, ...] = ()) -> pmd.Problem:
    """One constrained parameter under `density`, a NumPyro distribution."""
    return pmd.Problem(
        log_prior=lambda t: density.log_prob(t).sum(),
        log_likelihood=lambda t, row: 0.0 * row,
        sample_prior=lambda key: density.sample(key, shape),
        constraints=constraint,
    )


@pytest.mark.parametrize(
    ("constraint", "density"),
    [
        (on.positive, dist.Gamma(2.0, 3.0)),
        (on.unit_interval, dist.Beta(2.0, 5.0)),
        (on.real, dist.StudentT(4.0)),
        (on.interval(-1.0, 2.0), dist.Uniform(-1.0, 2.0)),
        (on.corr_cholesky, dist.LKJCholesky(2, 1.5)),
    ],
    ids=["positive", "unit_interval", "real", "interval", "corr_cholesky"],
)
def test_one_constrained_number_integrates_to_one(constraint: Any, density: Any) -> None:
    with jax.enable_x64(True):
        flat = constrained(constraint, density).flat()
        assert flat.dimension == 1
        # The trapezium rule on an analytic integrand with thin tails is exact to rounding; of
        # the Student t, (4 / v^2)^2 / v is left out beyond the ends.
        axis = jnp.linspace(-60.0, 60.0, 60001)
        total = jnp.trapezoid(jnp.exp(flat.log_prior(axis[:, None])), axis)
        assert abs(float(total) - 1) < 1e-5


@pytest.mark.parametrize(
    ("constraint", "density", "shape"),
    [
        (on.simplex, dist.Dirichlet(jnp.array([2.0, 1.0, 3.0])), ()),
        (on.ordered_vector, dist.TransformedDistribution(
            dist.Normal(0.0, 1.0).expand([2]).to_event(1),
            dist.transforms.OrderedTransform(),
        ), ()),
        (on.positive, dist.Gamma(2.0, 3.0), (2,)),
    ],
    ids=["simplex", "ordered_vector", "two positive"],
)  # fmt: skip
def test_two_constrained_numbers_integrate_to_one(
    constraint: Any, density: Any, shape: tuple[int, ...]
) -> None:
    with jax.enable_x64(True):
        flat = constrained(constraint, density, shape).flat()
        assert flat.dimension == 2
        axis = np.linspace(-25.0, 15.0, 401)
        points = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
        values = np.exp(np.asarray(flat.log_prior(jnp.asarray(points))))
        assert abs(values.sum() * (axis[1] - axis[0]) ** 2 - 1) < 1e-5


@pytest.mark.parametrize(
    ("constraint", "draw", "free"),
    [
        (on.positive, lambda key: jnp.exp(jax.random.normal(key, (3,))), slice(None)),
        (on.unit_interval, lambda key: jax.random.uniform(key, (2,)), slice(None)),
        (on.ordered_vector, lambda key: jnp.sort(jax.random.normal(key, (4,))), slice(None)),
        (on.simplex, lambda key: jax.random.dirichlet(key, jnp.ones(4)), slice(0, 3)),
        # rows of a correlation's Cholesky factor have length one: their last entries follow
        (on.corr_cholesky, lambda key: dist.LKJCholesky(3).sample(key), np.array([3, 6, 7])),
    ],
    ids=["positive", "unit_interval", "ordered_vector", "simplex", "corr_cholesky"],
)
def test_jacobian_against_autodiff(constraint: Any, draw: Any, free: Any) -> None:
    problem = pmd.Problem(
        lambda t: 0.0 * t.sum(), lambda t, row: 0.0 * row, draw, constraints=constraint
    )
    with jax.enable_x64(True):
        structure = problem.flat().structure
        theta = problem.flat().sample(jax.random.key(7), jnp.arange(5))
        change = jax.jacobian(lambda v: structure.unravel(v).ravel()[free])
        _, expected = np.linalg.slogdet(np.asarray(jax.jit(jax.vmap(change))(theta)))
        got = jax.jit(jax.vmap(structure.log_det))(theta)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_constraints_of_some_leaves_only() -> None:
    problem = pmd.Problem(
        log_prior=lambda t: (
            dist.Gamma(2.0, 3.0).log_prob(t["scale"]) + targets.log_normal(t["mean"])
        ),
        log_likelihood=lambda t, row: targets.log_normal(row - t["mean"], t["scale"]),
        sample_prior=lambda key: {
            "mean": jax.random.normal(key), "scale": jax.random.gamma(key, 2.0) / 3.0,
        },
        constraints={"scale": on.positive},
    )  # fmt: skip
    flat = problem.flat()
    theta = np.asarray(flat.sample(jax.random.key(0), jnp.arange(100)), float)
    scale = np.exp(theta[:, 1])
    expected = stats.norm.logpdf(theta[:, 0]) + stats.gamma.logpdf(scale, 2, scale=1 / 3)
    vectors = jnp.asarray(theta, jnp.float32)
    np.testing.assert_allclose(flat.log_prior(vectors), expected + theta[:, 1], atol=2e-5)
    row = jnp.asarray([0.7])
    likelihood = stats.norm.logpdf(0.7, theta[:, 0], scale)
    np.testing.assert_allclose(flat.log_likelihood(vectors, row)[0], likelihood, rtol=1e-4)
