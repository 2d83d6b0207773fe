"""Ridge regressions against the normal equations and dense solves they stand for."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmd.densities import ridge


def rows_of(n: int, d: int, seed: int = 0) -> ridge.Rows:
    """Values of no simple function, with noise that differs from row to row."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, d))
    y = z[:, 0] * z[:, -1] + np.sin(z).sum(1) + 2
    return ridge.rows_from(z, y, 1e-4 + rng.random(n) ** 4, 1.7)


def hermite(z: np.ndarray) -> np.ndarray:
    """1, z_i, (z_i^2 - 1) / sqrt 2, z_i z_j."""
    i, j = np.triu_indices(z.shape[1], 1)
    return np.c_[np.ones(len(z)), z, (z**2 - 1) / np.sqrt(2), z[:, i] * z[:, j]]


@pytest.mark.parametrize(("n", "d"), [(400, 1), (400, 4), (30, 6)])
def test_quadratic_is_the_ridge_regression(n: int, d: int) -> None:
    """Conjugate gradients reach what the normal equations give, fewer rows than terms or not."""
    rows = rows_of(n, d)
    f, noise = hermite(np.asarray(rows.z)), np.asarray(rows.noise)
    prior = np.full(f.shape[1], 1 / 1.7)
    prior[: d + 1] /= ridge.LINEAR
    normal = (f / noise[:, None]).T @ f + np.diag(prior)
    expected = hermite(x := np.random.default_rng(1).standard_normal((50, d))) @ np.linalg.solve(
        normal, f.T @ (np.asarray(rows.y) / noise)
    )
    with jax.enable_x64(True):
        found = np.asarray(ridge.evaluate(ridge.fit_quadratic(rows), x))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_quadratic_finds_a_quadratic() -> None:
    """Noise-free values of a quadratic give its coefficients back."""
    rng = np.random.default_rng(3)
    z, h = rng.standard_normal((300, 5)), rng.standard_normal((5, 5))
    h, b = h + h.T, rng.standard_normal(5)
    y = 3 + z @ b + 0.5 * np.einsum("ni,ij,nj->n", z, h, z)
    with jax.enable_x64(True):
        found = ridge.fit_quadratic(ridge.rows_from(z, y, np.full(300, 1e-6), 10.0))
    np.testing.assert_allclose(found.curvature, h, atol=1e-5)
    np.testing.assert_allclose(found.slope, b, atol=1e-5)
    np.testing.assert_allclose(found.constant, 3, atol=1e-5)


SHAPES = [
    ridge.Shape(),
    ridge.Shape(higher=0.003),
    ridge.Shape(bump=1.0, length=0.6),
    ridge.Shape(slope=0.0, higher=0.0, bump=1.0, length=2.0),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_fit_is_the_dense_solve(shape: ridge.Shape) -> None:
    """(K + noise / amplitude) c = y, with k written out from its definition."""
    rows, d = rows_of(100, 3), 3

    def k(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        u = a @ b.T / d
        far = ((a[:, None] - b) ** 2).sum(2)
        poly = 1 + shape.slope * (4 * u + 6 * u**2) + shape.higher * (4 * u**3 + u**4)
        return 10 * poly + shape.bump * np.exp(-far / (d * shape.length**2))

    z, x = np.asarray(rows.z), np.random.default_rng(1).standard_normal((20, d))
    coefficients = np.linalg.solve(k(z, z) + np.diag(np.asarray(rows.noise) / 1.7), rows.y)
    with jax.enable_x64(True):
        found = ridge.evaluate(ridge.fit_kernel(rows, shape), x)
        full = ridge.padded(rows, ridge.padded_size(100))
        compiled = ridge._solve_kernel(full, shape)  # what accelerators use
    np.testing.assert_allclose(found, k(x, z) @ coefficients, atol=1e-7)
    np.testing.assert_allclose(compiled[:100], coefficients, rtol=1e-5, atol=1e-7)
    assert not np.asarray(compiled[100:]).any()


def test_rows_of_infinite_noise_count_for_nothing() -> None:
    """Padding, and rows left out by hand, leave a quadratic as it is."""
    rows = rows_of(200, 3)
    noise = np.where(np.arange(200) < 120, np.asarray(rows.noise), np.inf)
    few = ridge.rows_from(*(np.asarray(a)[:120] for a in rows[:3]), 1.7)
    with jax.enable_x64(True):
        some, all_but = ridge.fit_quadratic(few), ridge.fit_quadratic(rows._replace(noise=noise))
    np.testing.assert_allclose(some.curvature, all_but.curvature, atol=1e-7)


def test_rotations_change_no_fit() -> None:
    """Kernels and the quadratic's prior depend on inner products alone."""
    rows = rows_of(150, 3)
    turn = np.linalg.qr(np.random.default_rng(2).standard_normal((3, 3)))[0]
    x = np.random.default_rng(1).standard_normal((20, 3))
    turned = rows._replace(z=np.asarray(rows.z) @ turn)
    with jax.enable_x64(True):
        for fit in (ridge.fit_quadratic, lambda rows: ridge.fit_kernel(rows, SHAPES[2])):
            one, other = ridge.evaluate(fit(rows), x), ridge.evaluate(fit(turned), x @ turn)
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_matrix_that_is_not_positive_definite_gives_nan() -> None:
    """Two rows at one place, with noise below rounding."""
    z = np.ones((2, 2))
    rows = ridge.rows_from(z, np.array([0.0, 1.0]), np.full(2, -1.0), 1.0)
    with jax.enable_x64(True):
        assert np.isnan(np.asarray(ridge.fit_kernel(rows, ridge.Shape()).coefficients)).any()


@given(st.integers(1, 20_000))
def test_few_sizes(n: int) -> None:
    """Padded sizes are large enough, not much larger, and few."""
    size = ridge.padded_size(n)
    assert n <= size <= max(n + 63, 1.25 * n + 1)
    assert size % 64 == 0
    assert ridge.padded_size(size) == size


def test_at_most_four_sizes_an_octave() -> None:
    """Above 512 there are four sizes between one power of two and the next."""
    sizes = {ridge.padded_size(n) for n in range(1025, 2049)}
    assert sizes == {1280, 1536, 1792, 2048}
