"""Kernel mixtures against formulas by hand, dense sums and Monte Carlo errors."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from scipy.special import logsumexp

from pmd import densities
from pmd.densities import (
    blocked,
    epanechnikov,
    gaussian_kernel,
    isotropic,
    local,
    median,
    scott,
    theory,
)
from pmd.densities.kernel import Arrays, Kernel, KernelMixture, _draw, _log_prob
from pmd.errors import InputError, InputTypeError

RULES = [isotropic(), theory(), median(), scott(), local(2)]
SHAPES = [gaussian_kernel, epanechnikov]
KEY = jax.random.key(0)


def cloud(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two lopsided groups in two dimensions, and log-weights."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(n, 2)) @ [[0.3, 0.2], [0.0, 0.5]] + [-4, 0]
    right = rng.normal(size=(n, 2)) @ [[1.0, -0.4], [0.0, 0.4]] + [3, 1]
    theta = np.where(rng.uniform(size=(n, 1)) < 0.3, left, right)
    return theta, 0.5 * rng.normal(size=n)


def fitted(rule: Any, theta: np.ndarray, log_w: np.ndarray, **options: Any) -> KernelMixture:
    return densities.kernel(rule, **options).fit(KEY, theta, log_w, log_w)


def by_hand(mix: KernelMixture, x: np.ndarray) -> np.ndarray:
    """log sum_i w_i K(chol^-1 (x - centre_i)) / det chol, as one dense sum in float64."""
    centre, log_w, chol = (np.asarray(a, float) for a in (mix.centre, mix.log_weight, mix.chol))
    cluster = np.asarray(mix.cluster)
    d = x.shape[1]
    total = np.full((len(x), len(centre)), -np.inf)
    for j in np.flatnonzero(np.isfinite(log_w)):
        factor = chol[cluster[j]]
        z = np.linalg.solve(factor, (np.asarray(x, float) - centre[j]).T)
        log_det = np.log(np.diag(factor)).sum()
        if mix.kernel is epanechnikov:
            with np.errstate(divide="ignore"):
                parts = np.log(np.maximum(1 - z**2 / 5, 0) * 0.75 / np.sqrt(5)).sum(0)
        else:
            parts = -0.5 * (z**2).sum(0) - 0.5 * d * np.log(2 * np.pi)
        total[:, j] = log_w[j] + parts - log_det
    with np.errstate(divide="ignore"):
        return logsumexp(total, axis=1)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks so small that a few particles fill several."""
    monkeypatch.setattr(blocked, "_block_sizes", lambda: (16, 8))
    for program in (_log_prob, _draw):
        program.clear_cache()
    yield
    for program in (_log_prob, _draw):
        program.clear_cache()


def test_bandwidths_are_those_of_the_rules() -> None:
    theta, log_w = cloud()
    used = np.append(log_w, np.full(4, -np.inf))
    more = np.vstack([theta, np.full((4, 2), 1e9)])
    for rule, h in (
        (isotropic(2.0), 2 * 60**-0.5),
        (isotropic(1.5, power=0.25), 1.5 * 60**-0.25),
        (theory(1.0), 60 ** (-1 / 4)),
    ):
        mix = fitted(rule, more, used)
        np.testing.assert_allclose(mix.chol, h * np.eye(2)[None], rtol=1e-6)
        np.testing.assert_allclose(mix.centre[:60], theta, rtol=1e-6)
    for n in (7, 8, 60):
        x = theta[:n]
        mix = fitted(median(), more, np.where(np.arange(64) < n, 0, -np.inf))
        np.testing.assert_allclose(mix.chol[0, 0, 0], 0.1 * np.median(pdist(x)), rtol=1e-5)


def test_scott_keeps_mean_and_covariance() -> None:
    theta, log_w = cloud()
    w = np.exp(log_w - logsumexp(log_w))
    cov = np.cov(theta.T, aweights=w, ddof=0)
    mix = fitted(scott(), theta, log_w)
    h = (1 / (w**2).sum()) ** (-1 / 6)
    np.testing.assert_allclose(mix.chol[0] @ mix.chol[0].T, h**2 * cov, rtol=1e-4)
    v = np.exp(mix.log_weight)
    np.testing.assert_allclose(v @ mix.centre, w @ theta, atol=1e-5)
    between = np.cov(np.asarray(mix.centre).T, aweights=v, ddof=0)
    np.testing.assert_allclose(between + mix.chol[0] @ mix.chol[0].T, cov, rtol=1e-4)


def test_local_keeps_them_in_each_cluster() -> None:
    theta, log_w = cloud()
    mix = fitted(local(2), theta, log_w)
    assert mix.num_components == 2
    w = np.exp(log_w - logsumexp(log_w))
    v, cluster = np.exp(mix.log_weight), np.asarray(mix.cluster)
    left = theta[:, 0] < -1
    for group in (left, ~left):
        mass = w[group].sum()
        k = next(
            k for k in np.unique(cluster) if np.isclose(v[cluster == k].sum(), mass, atol=1e-5)
        )
        inside = cluster == k
        np.testing.assert_allclose(
            v[inside] @ np.asarray(mix.centre)[inside] / mass,
            w[group] @ theta[group] / mass,
            atol=1e-4,
        )
        between = np.cov(np.asarray(mix.centre)[inside].T, aweights=v[inside], ddof=0)
        cov = np.cov(theta[group].T, aweights=w[group], ddof=0)
        np.testing.assert_allclose(between + mix.chol[k] @ mix.chol[k].T, cov, rtol=1e-3, atol=1e-4)
    # What it is for: a density of two groups that one covariance over both would blur.
    test, _ = cloud(seed=1)
    gain = mix.log_prob(test) - fitted(scott(), theta, log_w).log_prob(test)
    assert gain.mean() > 4 * gain.std() / np.sqrt(60)


def test_local_sees_one_cluster_where_there_is_one() -> None:
    theta = np.random.default_rng(0).normal(size=(60, 2)) * [1, 5]
    mix = fitted(local(2), theta, np.zeros(60))
    assert mix.num_components == 1
    one = fitted(scott(), theta, np.zeros(60))
    np.testing.assert_allclose(mix.log_prob(theta), one.log_prob(theta), rtol=1e-4)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_density_is_the_sum_by_hand_and_integrates_to_one(rule: Any, shape: Any) -> None:
    theta, log_w = cloud()
    mix = fitted(rule, theta, log_w, kernel=shape)
    side = np.linspace(-9, 9, 201)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    found = np.asarray(mix.log_prob(grid))
    some = slice(0, len(grid), 997)
    expected = by_hand(mix, grid[some])
    # Relative to the density: the edge of a compact kernel is nearer than float32 can tell.
    np.testing.assert_allclose(np.exp(found[some]), np.exp(expected), rtol=1e-3, atol=1e-7)
    if float(mix.chol[0, 0, 0]) > 0.1:  # the grid is .09 wide
        np.testing.assert_allclose(np.exp(found).sum() * 0.09**2, 1, atol=2e-3)


@pytest.mark.parametrize(("rule", "n"), [(scott(), 1), (scott(), 37), (local(2), 37)], ids=str)
def test_blocks_do_not_matter(small_blocks: None, rule: Any, n: int) -> None:
    theta, log_w = cloud()
    log_w[::7] = -np.inf
    mix = fitted(rule, theta, log_w)
    x = np.random.default_rng(1).normal(size=(n, 2)) * 3
    np.testing.assert_allclose(mix.log_prob(x), by_hand(mix, x), rtol=1e-4, atol=1e-4)


def test_float64_is_exact(small_blocks: None) -> None:
    with jax.enable_x64(True):
        theta, log_w = cloud()
        mix = fitted(scott(), theta, log_w)
        np.testing.assert_allclose(mix.log_prob(theta), by_hand(mix, theta), rtol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_float32_stays_float32_where_float64_is_on(rule: Any) -> None:
    with jax.enable_x64(True):
        theta, log_w = (jnp.asarray(a, jnp.float32) for a in cloud())
        draws = jax.eval_shape(
            lambda: densities.kernel(rule).fit(KEY, theta, log_w, log_w).draw(KEY, 9)
        )
        assert {part.dtype for part in draws} == {np.dtype(np.float32)}


def test_far_points_and_narrow_kernels_in_float32() -> None:
    theta, log_w = cloud()
    theta, x = theta.astype(np.float32), np.float32([[1e3, 0], [-3, 40], [2, 1]])
    mix = fitted(scott(), theta, log_w)
    np.testing.assert_allclose(mix.log_prob(x), by_hand(mix, x), rtol=1e-5)
    # A bandwidth h of 1.3e-4: squares of whitened coordinates, 1e9, would cancel to some 60 nats.
    # What is left is rounding of the coordinates themselves, eps |x| / h |z| = .007.
    narrow = fitted(isotropic(1e-3), theta, log_w)
    near = theta[:5] + np.float32(1e-4)
    np.testing.assert_allclose(narrow.log_prob(near), by_hand(narrow, near), atol=0.01)
    assert np.isneginf(fitted(scott(), theta, log_w, kernel=epanechnikov).log_prob(x)[0])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_more_coordinates_than_are_taken_at_a_time(shape: Any) -> None:
    theta = np.random.default_rng(0).normal(size=(50, 11))
    mix = fitted(theory(), theta, np.zeros(50), kernel=shape)
    x = theta + np.random.default_rng(1).uniform(-1, 1, size=(50, 11))
    np.testing.assert_allclose(mix.log_prob(x), by_hand(mix, x), rtol=1e-3)
    assert np.isfinite(mix.log_prob(x)).all()


def test_traced_is_eager_and_one_scan_compiles_once() -> None:
    rule, traces = densities.kernel(), []
    theta = jnp.asarray(cloud()[0], jnp.float32)
    log_w = jnp.zeros(60)

    def step(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        traces.append(1)
        draws = rule.fit(key, x, log_w, log_w).draw(key, 60)
        return draws.theta, draws.log_q

    scan = jax.jit(lambda key: jax.lax.scan(step, theta, jax.random.split(key, 3))[1])
    found = scan(KEY)
    scan(jax.random.key(1))
    assert len(traces) == 1
    x = theta
    for key, expected in zip(jax.random.split(KEY, 3), found, strict=True):
        x, log_q = step(x, key)
        np.testing.assert_allclose(log_q, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rule", [scott(), local(2), theory()], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_draws_have_the_moments_of_the_mixture(rule: Any, shape: Any) -> None:
    theta, log_w = cloud()
    mix = fitted(rule, theta, log_w, kernel=shape)
    n = 20_000
    draws = mix.draw(KEY, n)
    x, v = np.asarray(draws.theta), np.exp(np.asarray(mix.log_weight, float))
    centre, cluster = np.asarray(mix.centre), np.asarray(mix.cluster)
    cov = sum(v[cluster == k].sum() * c @ c.T for k, c in enumerate(np.asarray(mix.chol))) + np.cov(
        centre.T, aweights=v, ddof=0
    )
    sd = np.sqrt(np.diag(cov))
    assert (np.abs(x.mean(0) - v @ centre) < 4 * sd / np.sqrt(n)).all()
    # Fourth moments here are below 10 sd^4.
    assert (np.abs(np.cov(x.T) - cov) < 4 * np.sqrt(10 / n) * np.outer(sd, sd)).all()
    np.testing.assert_allclose(draws.log_q[::999], by_hand(mix, x[::999]), rtol=1e-3)
    np.testing.assert_array_equal(draws.log_f, draws.log_q)


def test_numbers_of_draws_per_centre() -> None:
    rng = np.random.default_rng(0)
    theta, log_w = np.arange(50.0)[:, None], np.log(rng.uniform(size=50))
    mix = fitted(isotropic(1e-6), theta, log_w)
    n, w = 1000, np.exp(np.asarray(mix.log_weight, float))

    def counts(key: int, independent: bool | None) -> np.ndarray:
        x = np.asarray(mix.draw(jax.random.key(key), n, independent).theta)[:, 0]
        return np.bincount(np.rint(x).astype(int), minlength=50)

    assert (np.abs(counts(0, None) - n * w) < 1 + 1e-3).all()
    many = np.array([counts(k, True) for k in range(40)])
    expected = n * w * (1 - w)
    # Mean and variance of 40 multinomial counts, summed over 50 centres.
    chi2 = ((many - n * w) ** 2 / expected).mean()
    assert abs(chi2 - 1) < 5 * np.sqrt(2 / (40 * 49))
    assert (np.abs(many.mean(0) - n * w) < 5 * np.sqrt(expected / 40)).all()
    assert densities.kernel(independent=True).fit(KEY, theta, log_w, log_w).independent


@given(seed=st.integers(0, 1000), shift=st.floats(-500, 500))
@settings(max_examples=4)
def test_shift_order_and_padding_do_not_matter(seed: int, shift: float) -> None:
    theta, log_w = cloud(50)
    order = np.random.default_rng(seed).permutation(60)
    more = np.vstack([theta, np.full((10, 2), 1e20)])[order]
    weights = np.append(log_w + shift, np.full(10, -np.inf))[order]
    x = cloud(seed=2)[0]
    for rule in (isotropic(), theory(), median(), scott()):
        np.testing.assert_allclose(
            fitted(rule, more, weights).log_prob(x),
            fitted(rule, theta, log_w).log_prob(x),
            rtol=1e-3, atol=2e-3,
        )  # fmt: skip


CLOUDS = {
    "zero": np.zeros((20, 3)),
    "equal": np.full((20, 3), -7.7),
    "constant": np.random.default_rng(0).normal(size=(20, 3)) * [1, 1, 0] + 5,
    "few": np.random.default_rng(0).normal(size=(3, 3)),
    "one": np.ones((1, 3)),
}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_degenerate_clouds_are_no_nan(rule: Any) -> None:
    for cloud in CLOUDS.values():
        # Rows of no weight up to 20, so that one program serves all clouds.
        log_w = np.where(np.arange(20) < len(cloud), 0, -np.inf)
        theta = np.pad(cloud, ((0, 20 - len(cloud)), (0, 0)), mode="edge")
        for shape in SHAPES if rule == scott() else [gaussian_kernel]:
            mix = fitted(rule, theta, log_w, kernel=shape)
            draws = mix.draw(KEY, 20)
            for numbers in (mix.chol, mix.log_prob(theta), draws.theta, draws.log_q):
                assert np.isfinite(numbers).all()
            assert not np.isnan(mix.log_prob(theta + 1)).any()
            assert (np.diagonal(mix.chol, axis1=1, axis2=2) > 0).all()
            assert mix.num_components == 1


def test_memory_does_not_grow_with_the_square() -> None:
    sizes = ((20_000, 10), (20_000,), (20_000,), (1, 10, 10))
    kinds = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
    arrays = Arrays(*map(jax.ShapeDtypeStruct, sizes, kinds))
    points = jax.ShapeDtypeStruct((20_000, 10), jnp.float32)
    used = _log_prob.lower(gaussian_kernel, arrays, points).compile().memory_analysis()
    assert used.temp_size_in_bytes < 40e6  # the dense matrix has 1600e6


def test_packed_and_back() -> None:
    theta, log_w = cloud()
    for shape in SHAPES:
        mix = fitted(local(2), theta, log_w, kernel=shape, independent=True)
        again = densities.unpack(mix.pack())
        np.testing.assert_array_equal(again.log_prob(theta), mix.log_prob(theta))
        assert (again.name, again.kernel, again.independent) == ("local", shape, True)
        assert np.isnan(again.error)
    with pytest.raises(InputError, match="not known here"):
        densities.unpack({"rule": np.asarray("spline")})


def test_wrong_rules_are_refused() -> None:
    for make in (lambda: isotropic(0), lambda: theory(-1), lambda: median(0), lambda: local(0)):
        with pytest.raises(InputError, match=r"positive|or more"):
            make()
    with pytest.raises(InputTypeError, match=r"scott\(\)"):
        densities.kernel("scott")
    with pytest.raises(InputTypeError, match=r"scott\(\)"):
        densities.kernel(scott)
    with pytest.raises(InputTypeError, match="epanechnikov"):
        densities.kernel(kernel="box")
    assert isinstance(densities.kernel(), Kernel)
    assert hash(densities.kernel(local(3))) == hash(densities.kernel(local(3)))
