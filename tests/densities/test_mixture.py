"""Small Gaussian mixtures against SciPy, closed forms and Monte Carlo errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from pmd.densities import mixture
from pmd.densities.mixture import Mixture


def example(dtype: type = float) -> tuple[Mixture, np.ndarray]:
    """An asymmetric mixture in two dimensions, and the covariances of its components."""
    chol = np.array([[[1.0, 0.0], [0.5, 0.4]], [[0.3, 0.0], [-0.2, 0.9]]])
    mix = Mixture(np.log([0.3, 0.7]), np.array([[-3.0, 1.0], [2.0, 0.0]]), chol)
    return Mixture(*(jnp.asarray(part, dtype) for part in mix)), chol @ chol.transpose(0, 2, 1)


def blobs(
    seed: int, centres: np.ndarray, shares: list[float], n: int, sd: float = 1.0
) -> jax.Array:
    """n points around some centres, by shares."""
    rng = np.random.default_rng(seed)
    which = rng.choice(len(centres), n, p=shares)
    return jnp.asarray(centres[which] + sd * rng.normal(size=(n, centres.shape[1])))


def even(n: int) -> jax.Array:
    """Equal weights."""
    return jnp.full(n, 1 / n)


def test_log_density_is_that_of_scipy(precision: float) -> None:
    mix, cov = example()
    x = np.random.default_rng(0).normal(size=(50, 2)) * 3
    parts = np.stack(
        [
            w * multivariate_normal(m, c).pdf(x)
            for w, m, c in zip([0.3, 0.7], mix.mean, cov, strict=True)
        ],
        1,
    )
    np.testing.assert_allclose(
        mixture.component_log_prob(mix, jnp.asarray(x)),
        np.log(parts),
        rtol=100 * precision,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        mixture.log_prob(mix, jnp.asarray(x)), np.log(parts.sum(1)), rtol=100 * precision, atol=1e-6
    )


def test_unused_components_count_for_nothing() -> None:
    mix, _ = example()
    more = Mixture(*(jnp.concatenate([part, part[:1]]) for part in mix))
    more = more._replace(log_pi=more.log_pi.at[2].set(-jnp.inf))
    x, u = jnp.ones((5, 2)), jax.random.uniform(jax.random.key(0), (100, 3))
    np.testing.assert_allclose(mixture.log_prob(more, x), mixture.log_prob(mix, x), rtol=1e-5)
    np.testing.assert_allclose(mixture.transport(more, u), mixture.transport(mix, u), rtol=1e-6)
    assert mixture.num_components(more) == 2


def test_transport_takes_quantiles_to_quantiles(precision: float) -> None:
    mix, _ = example()
    u = jnp.array([[0.1, 0.5, 0.5], [0.29, 0.8413447, 0.5], [0.31, 0.5, 0.5], [1.0, 0.5, 0.5]])
    expected = [[-3.0, 1.0], [-2.0, 1.5], [2.0, 0.0], [2.0, 0.0]]
    np.testing.assert_allclose(mixture.transport(mix, u), expected, atol=1e-5)
    corners = mixture.transport(mix, jnp.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    assert bool(jnp.isfinite(corners).all())


def test_samples_have_the_moments_of_the_mixture() -> None:
    mix, cov = example()
    n = 20_000
    x = np.asarray(mixture.sample(jax.random.key(3), mix, n))
    pi, means = np.array([0.3, 0.7]), np.asarray(mix.mean)
    mean = pi @ means
    second = sum(p * (c + np.outer(m, m)) for p, c, m in zip(pi, cov, means, strict=True))
    spread = np.sqrt(np.diag(second) - mean**2)
    assert (np.abs(x.mean(0) - mean) < 4 * spread / np.sqrt(n)).all()
    # Fourth moments of these components are below 10 sd^4: a sample covariance has a standard
    # error below sqrt(10 / n) sd_i sd_j.
    error = np.abs(np.cov(x.T) - (second - np.outer(mean, mean)))
    assert (error < 4 * np.sqrt(10 / n) * np.outer(spread, spread)).all()
    # Stratified: the components' numbers are right to one; in random order: halves are alike.
    left = (x[:, 0] < 0.3).astype(float)
    assert abs(left.sum() - 0.3 * n) < 40
    assert abs(left[: n // 2].mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / n)


def test_moments_are_the_weighted_ones_and_ignore_zero_weights(precision: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)) @ rng.normal(size=(3, 3)) + [100.0, -3.0, 0.0]
    w = rng.uniform(size=200)
    w /= w.sum()
    cov = np.cov(x.T, aweights=w, ddof=0)
    for rows, weights in (
        (x, w),
        (np.vstack([x, np.full((7, 3), 1e30)]), np.append(w, np.zeros(7))),
    ):
        mean, chol = mixture.moments(jnp.asarray(rows), jnp.asarray(weights))
        np.testing.assert_allclose(mean, w @ x, atol=1000 * precision)
        np.testing.assert_allclose(chol @ chol.T, cov, rtol=1e-3, atol=1e-3 * np.trace(cov))
    if precision < 1e-10:
        np.testing.assert_allclose(chol @ chol.T, cov, rtol=1e-8)


@given(scale=st.floats(-6, 6))
@settings(max_examples=5)
def test_moments_follow_units(scale: float) -> None:
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (100, 2), jnp.float64)
        units = jnp.array([10.0**scale, 1.0])
        mean, chol = mixture.moments(x, even(100))
        other, taller = mixture.moments(x * units, even(100))
        np.testing.assert_allclose(other, mean * units, rtol=1e-9)
        np.testing.assert_allclose(taller, chol * units[:, None], rtol=1e-9)


@pytest.mark.parametrize(
    "cloud",
    [
        np.zeros((50, 3)),
        np.full((50, 3), 7.7),
        np.random.default_rng(0).normal(size=(50, 3)) * [1, 1, 0] + 5,
        np.random.default_rng(0).normal(size=(3, 3)),
        np.ones((1, 3)),
        np.random.default_rng(0).normal(size=(50, 1)) * np.ones(3),
    ],
    ids=["zero", "equal", "constant", "few", "one", "line"],
)
def test_degenerate_clouds_get_a_floor(precision: float, cloud: np.ndarray) -> None:
    x = jnp.asarray(cloud)
    _, chol = mixture.moments(x, even(len(x)))
    assert np.isfinite(chol).all()
    assert (np.diag(chol) > 0).all()
    mix = mixture.clusters(jax.random.key(0), x, even(len(x)))
    assert mixture.num_components(mix) == 1
    assert np.isfinite(mixture.log_prob(mix, x)).all()
    assert not np.isnan(mixture.log_prob(mix, x + 1)).any()


def test_em_climbs() -> None:
    x = blobs(0, np.array([[0.0, 0.0], [4.0, 1.0]]), [0.4, 0.6], 512)
    start = Mixture(jnp.log(jnp.array([0.5, 0.5])), x[:2], jnp.stack([jnp.eye(2)] * 2))
    levels = [mixture.em(x, even(512), start, jnp.eye(2), steps)[1] for steps in range(6)]
    assert (np.diff(levels) > -1e-6).all()
    mix, level = mixture.em(x, even(512), start, jnp.eye(2), 100)
    np.testing.assert_allclose(level, mixture.log_prob(mix, x).mean(), rtol=1e-4)
    # A gain so small that the target is out of reach ends the run after five steps.
    _, reached = mixture.em(x, even(512), start, jnp.eye(2), 100, target=1e3)
    assert reached <= level


CENTRES = np.array([[0.0, 0.0], [6.0, 1.0], [-1.0, 7.0]])


@pytest.mark.parametrize(("count", "shares"), [(1, [1.0]), (2, [0.3, 0.7]), (3, [0.2, 0.5, 0.3])])
def test_the_number_of_clusters_is_found(precision: float, count: int, shares: list[float]) -> None:
    for seed in range(2):
        x = blobs(seed, CENTRES[:count], shares, 512)
        mix = mixture.clusters(jax.random.key(seed), x, even(512))
        assert mixture.num_components(mix) == len(mix.log_pi) == count
        nearest = np.linalg.norm(CENTRES[:count, None] - np.asarray(mix.mean), axis=2).argmin(1)
        # Four standard errors of a share and of a mean.
        np.testing.assert_allclose(np.exp(mix.log_pi)[nearest], shares, atol=4 * 0.5 / np.sqrt(512))
        error = np.abs(np.asarray(mix.mean)[nearest] - CENTRES[:count])
        assert (error < 4 / np.sqrt(512 * np.array(shares))[:, None]).all()


@pytest.mark.parametrize("d", [1, 8])
def test_one_gaussian_is_one_cluster(d: int) -> None:
    x = jax.random.normal(jax.random.key(d), (512, d)) * jnp.arange(1, d + 1)
    assert mixture.num_components(mixture.clusters(jax.random.key(0), x, even(512))) == 1


def test_clusters_of_many_points_come_from_a_subset_and_end_on_all() -> None:
    x = blobs(1, CENTRES[:2], [0.3, 0.7], 1500)
    mix = mixture.clusters(jax.random.key(0), x, even(1500), subset=500)
    assert len(mix.log_pi) == 2
    np.testing.assert_allclose(
        np.sort(np.exp(mix.log_pi)), [0.3, 0.7], atol=4 * 0.5 / np.sqrt(1500)
    )


def test_weights_decide_and_rows_of_no_weight_do_not() -> None:
    x = blobs(2, CENTRES[:2], [0.5, 0.5], 480)
    left = jnp.where(x[:, 0] < 3, 1.0, 0.0)
    assert len(mixture.clusters(jax.random.key(0), x, left / left.sum()).log_pi) == 1
    mix = mixture.clusters(jax.random.key(0), x, even(480))
    more = jnp.concatenate([x, jnp.full((20, 2), 1e6)])
    same = mixture.clusters(jax.random.key(0), more, jnp.append(even(480), jnp.zeros(20)))
    np.testing.assert_allclose(same.mean, mix.mean, rtol=1e-4, atol=1e-4)
    # Fewer effective points than a second component has parameters: not even tried.
    assert len(mixture.clusters(jax.random.key(0), x, even(480), effective=10).log_pi) == 1


@given(seed=st.integers(0, 100), scale=st.floats(0.1, 10))
@settings(max_examples=4)
def test_order_and_scale_of_the_weights_do_not_matter(seed: int, scale: float) -> None:
    x = blobs(3, CENTRES[:2], [0.3, 0.7], 512)
    order = np.random.default_rng(seed).permutation(512)
    mix = mixture.clusters(jax.random.key(0), x, even(512))
    other = mixture.clusters(jax.random.key(seed), x[order], scale * even(512))
    np.testing.assert_allclose(
        mixture.log_prob(other, x), mixture.log_prob(mix, x), atol=0.05
    )  # EM stops when a step gains less than 1e-4


def test_an_earlier_mixture_is_a_start() -> None:
    x = blobs(4, CENTRES, [0.2, 0.5, 0.3], 512)
    mix = mixture.clusters(jax.random.key(0), x, even(512))
    again = mixture.clusters(jax.random.key(1), x, even(512), start=mix)
    assert len(again.log_pi) == 3


def test_clusters_inside_a_traced_function_are_the_same() -> None:
    x = blobs(5, CENTRES, [0.2, 0.5, 0.3], 512)
    mix = mixture.clusters(jax.random.key(0), x, even(512))
    traced = jax.jit(lambda key: mixture.clusters_jittable(key, x, even(512), most=4))
    found = traced(jax.random.key(1))
    assert (mixture.num_components(found), len(found.log_pi)) == (3, 4)
    np.testing.assert_allclose(mixture.log_prob(found, x), mixture.log_prob(mix, x), atol=0.05)


def test_few_programs_serve_all_sizes() -> None:
    x = blobs(6, CENTRES[:2], [0.3, 0.7], 512)
    mixture.clusters(jax.random.key(0), x, even(512))
    before = mixture._best_of._cache_size()
    for n in (400, 450, 511):
        mixture.clusters(jax.random.key(0), x[:n], even(n))
    assert mixture._best_of._cache_size() == before


def test_the_wider_mixture() -> None:
    mix, _ = example()
    mean, chol = jnp.zeros(2), 2 * jnp.eye(2)
    wide = mixture.widen(mix, 0.2, 0.1, mean, chol)
    a = np.sqrt(0.2 / 2)
    np.testing.assert_allclose(
        np.exp(wide.log_pi), [0.9 * (0.21 + 0.15), 0.9 * (0.49 + 0.15), 0.1], rtol=1e-5
    )
    np.testing.assert_allclose(wide.chol[:2], np.sqrt(1 + a) * mix.chol, rtol=1e-6)
    np.testing.assert_allclose(wide.chol[2], np.sqrt(1 + 3 * a) * chol, rtol=1e-6)
    assert len(mixture.widen(mix, 0.2, 0.0, mean, chol).log_pi) == 2


def test_sobol_points() -> None:
    u = mixture.sobol(1, 1000, 3)
    assert u.shape == (1000, 3)
    assert ((u > 0) & (u < 1)).all()
    np.testing.assert_array_equal(u, mixture.sobol(1, 1000, 3))
    # Far better than 1 / sqrt(12 n) = .009.
    assert np.abs(u.mean(0) - 0.5).max() < 0.002
