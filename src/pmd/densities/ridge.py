"""Ridge regression of a function's values at whitened points: a full quadratic, or a kernel.

Rows are padded to few sizes by rows of infinite noise, which count for nothing: few programs are
compiled and no result changes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import linalg

LINEAR = 1e3  # prior variance of a quadratic's constant and slopes over that of its second order
TOLERANCE = 1e-8
STEPS = 200


class Quadratic(NamedTuple):
    """r(z) = constant + slope . z + z' curvature z / 2."""

    constant: Array
    slope: Array
    curvature: Array


class Shape(NamedTuple):
    """Which functions a kernel prefers: with u = z.z' / d, k(z, z') is

    10 (1 + slope (4 u + 6 u^2) + higher (4 u^3 + u^4)) + bump exp(-|z - z'|^2 / (d length^2)).
    """

    slope: float = 1.0
    higher: float = 1.0
    bump: float = 0.0
    length: float = 1.0


class Kernel(NamedTuple):
    """r(z) = sum_j coefficient_j k(z, centre_j)."""

    centres: Array
    coefficients: Array
    shape: Shape


Residual = Quadratic | Kernel


class Rows(NamedTuple):
    """Values y at whitened points z, with the noise variance of each and the prior's variance."""

    z: Array
    y: Array
    noise: Array
    amplitude: Array


def rows_from(z: np.ndarray, y: np.ndarray, noise: np.ndarray, amplitude: float) -> Rows:
    """Rows of NumPy arrays."""
    return Rows._make((z, y, noise, amplitude))


def zero(d: int) -> Quadratic:
    """The residual that is zero everywhere."""
    return Quadratic._make((np.zeros(()), np.zeros(d), np.zeros((d, d))))


def padded_size(n: int) -> int:
    """The next of at most four sizes an octave, multiples of 64."""
    step = max(64, 2 ** max(n - 1, 1).bit_length() // 8)
    return n + -n % step


def padded(rows: Rows, size: int) -> Rows:
    """The same rows and some of infinite noise, up to `size`."""
    more = size - len(rows.z)
    return Rows._make(
        (
            np.pad(rows.z, ((0, more), (0, 0))),
            np.pad(rows.y, (0, more)),
            np.pad(rows.noise, (0, more), constant_values=np.inf),
            rows.amplitude,
        )
    )


def evaluate(residual: Residual, z: Array) -> Array:
    """r(z) at points (n, d)."""
    if isinstance(residual, Quadratic):
        bend = 0.5 * jnp.sum((z @ residual.curvature) * z, axis=1)
        return residual.constant + z @ residual.slope + bend
    return kernel(residual.shape, z, residual.centres) @ residual.coefficients


def kernel(shape: Shape, a: Array, b: Array) -> Array:
    """The matrix k(a_i, b_j): see `Shape`."""
    d = a.shape[1]
    inner = a @ b.T
    u = inner / d
    poly = shape.slope * u * (4 + 6 * u) + shape.higher * u**3 * (4 + u)
    apart = inner - 0.5 * jnp.sum(a * a, axis=1)[:, None] - 0.5 * jnp.sum(b * b, axis=1)
    scale = 0.5 * d * shape.length**2
    return 10 * (1 + poly) + shape.bump * jnp.exp(jnp.minimum(apart, 0) / scale)


def fit_kernel(rows: Rows, shape: Shape) -> Kernel:
    """Kernel ridge regression: (K + diag(noise) / amplitude) coefficients = y, by Cholesky.

    Coefficients are NaN where the matrix is not positive definite to working accuracy.
    """
    n = len(rows.z)
    rows = padded(rows, padded_size(n))
    if jax.default_backend() != "cpu":
        return Kernel(rows.z, _solve_kernel(rows, shape), shape)
    # LAPACK in place: XLA's Cholesky and solves copy the matrix several times, which doubles the
    # time, and have to be compiled for every size.
    matrix = np.array(np.asarray(_matrix(rows.z, shape))[:n, :n])
    matrix[np.diag_indices(n)] += rows.noise[:n] / rows.amplitude
    try:
        factor = linalg.cho_factor(matrix.T, lower=True, overwrite_a=True, check_finite=False)
        solution = linalg.cho_solve(factor, rows.y[:n], check_finite=False)
    except linalg.LinAlgError:
        solution = np.full(n, np.nan)
    return Kernel._make((rows.z, np.pad(solution, (0, len(rows.z) - n)), shape))


def fit_quadratic(rows: Rows) -> Quadratic:
    """The ridge regression on all terms up to second order, by conjugate gradients.

    Minimises sum_i (r(z_i) - y_i)^2 / noise_i + |c|^2 / amplitude over the coefficients c of the
    Hermite polynomials 1, z_i, (z_i^2 - 1) / sqrt 2, z_i z_j, those of first order and less with
    a prior variance LINEAR times as large. In whitened coordinates these features are nearly
    orthogonal, so that some fifty steps, each two products of (n, d) by (d, d), replace normal
    equations of (d + 1)(d + 2) / 2 unknowns.
    """
    size = max(1024, 2 ** (len(rows.z) - 1).bit_length())
    return jax.tree.map(np.asarray, _solve_quadratic(padded(rows, size)))


@jax.jit
def _matrix(z: Array, shape: Shape) -> Array:
    return kernel(shape, z, z)


@jax.jit
def _solve_kernel(rows: Rows, shape: Shape) -> Array:
    live = jnp.isfinite(rows.noise)
    matrix = jnp.where(live[:, None] & live, kernel(shape, rows.z, rows.z), 0)
    matrix = matrix + jnp.diag(jnp.where(live, rows.noise / rows.amplitude, 1))
    chol = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    return jax.scipy.linalg.cho_solve((chol, True), jnp.where(live, rows.y, 0))


@jax.jit
def _solve_quadratic(rows: Rows) -> Quadratic:
    d = rows.z.shape[1]
    z, eye, root = rows.z, jnp.eye(d, dtype=rows.z.dtype), np.sqrt(2.0)
    precision = 1 / jnp.sqrt(rows.noise)
    linear, second = 1 / jnp.sqrt(LINEAR * rows.amplitude), 1 / jnp.sqrt(rows.amplitude)

    # The unknown is (constant, slope, matrix): Frobenius' inner product of symmetric matrices is
    # that of the coefficients of second order when the curvature is root 2 times the matrix.
    def forward(c: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        values = c[0] + z @ c[1] + (jnp.sum((z @ c[2]) * z, axis=1) - jnp.trace(c[2])) / root
        return precision * values, linear * c[0], linear * c[1], second * c[2]

    def adjoint(e: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        r = precision * e[0]
        total = jnp.sum(r)
        matrix = ((z * r[:, None]).T @ z - total * eye) / root
        return total + linear * e[1], z.T @ r + linear * e[2], matrix + second * e[3]

    def dot(a: tuple, b: tuple) -> Array:
        return sum((jnp.sum(x * y) for x, y in zip(a, b, strict=True)), jnp.zeros(()))

    def add(a: tuple, scale: Array, b: tuple) -> tuple:
        return tuple(x + scale * y for x, y in zip(a, b, strict=True))

    def going(state: tuple) -> Array:
        step, _, _, _, norm, first = state
        return (step < STEPS) & (norm > TOLERANCE**2 * first)

    def advance(state: tuple) -> tuple:
        step, c, error, direction, norm, first = state
        image = forward(direction)
        length = norm / dot(image, image)
        c, error = add(c, length, direction), add(error, -length, image)
        gradient = adjoint(error)
        new = dot(gradient, gradient)
        return step + 1, c, error, add(gradient, new / norm, direction), new, first

    start = (jnp.zeros((), z.dtype), jnp.zeros(d, z.dtype), jnp.zeros((d, d), z.dtype))
    error = (precision * rows.y, *start)
    gradient = adjoint(error)
    norm = dot(gradient, gradient)
    state = (jnp.zeros((), jnp.int32), start, error, gradient, norm, norm)
    _, (constant, slope, matrix), *_ = jax.lax.while_loop(going, advance, state)
    return Quadratic(constant - jnp.trace(matrix) / root, slope, root * matrix)
