"""Log-density of a mixture with one kernel per particle, in blocks: memory O(n + m), never n x m.

    log q(x_i) = log sum_j w_j K(z_i - z_j)

A block of points meets one block of centres after the other, and of each pair of blocks only the
sum is kept. Exponentials are taken once, of exponents moved by one constant for all, which is
right for points within some 15 bandwidths of a centre; a block of points where a sum vanishes is
done over with a running maximum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from pmd.densities.mixture import dot

# Squares of whitened coordinates times the rounding unit: above this, distances are summed
# coordinate by coordinate instead of taken from a matrix product, which would cancel.
CANCELLATION = 0.02


class Shape(Protocol):
    """A kernel with mean 0 and unit covariance."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def cancels(self) -> bool:
        """Whether `careful` makes a difference: the profile comes from a matrix product."""
        ...

    def log_constant(self, d: int) -> float:
        """log K(0)."""
        ...

    def exponents(self, a: Array, b: Array, level: Array, careful: bool) -> Array:
        """level_j + log K(a_i - b_j) - log K(0), (n, m), for a (n, d), b (m, d), level (m,)."""
        ...

    def sample(self, key: Array, shape: tuple[int, int], dtype: np.dtype) -> Array:
        """Independent draws from K."""
        ...


def _over_coordinates(term: Callable[[list[Array]], Array], a: Array, b: Array) -> Array:
    """The sum of term([a_ik - b_jk]) over the coordinates k, eight of them at a time."""
    d = a.shape[1]
    few = min(d, 8)
    # Coordinates of 0 are added up to a multiple of eight: they differ by nothing.
    parts = [jnp.pad(x, ((0, 0), (0, -d % few))).T.reshape(-1, few, len(x)) for x in (a, b)]

    def more(total: Array, pair: list[Array]) -> tuple[Array, None]:
        return total + term([x[:, None] - y for x, y in zip(*pair, strict=True)]), None

    if d == few:
        return term([x[:, None] - y for x, y in zip(parts[0][0], parts[1][0], strict=True)])
    return jax.lax.scan(more, jnp.zeros((len(a), len(b)), a.dtype), parts)[0]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Gaussian:
    """K(z) = (2 pi)^(-d/2) exp(-z'z / 2)."""

    name: str = "gaussian"
    cancels: bool = True

    def log_constant(self, d: int) -> float:
        """log K(0)."""
        return -0.5 * d * math.log(2 * math.pi)

    def exponents(self, a: Array, b: Array, level: Array, careful: bool) -> Array:
        """level_j - |a_i - b_j|^2 / 2."""
        if careful:
            return level + _over_coordinates(lambda u: -0.5 * reduce(add, (x * x for x in u)), a, b)
        # One product of (a, 1, -|a|^2 / 2) and (b, level - |b|^2 / 2, 1): sums cost as much as it.
        half = 0.5 * jnp.sum(a * a, axis=1)[:, None]
        left = jnp.concatenate([a, jnp.ones_like(half), -half], axis=1)
        middle = (level - 0.5 * jnp.sum(b * b, axis=1))[:, None]
        right = jnp.concatenate([b, middle, jnp.ones_like(middle)], axis=1)
        return jnp.minimum(dot(left, right.T), level)

    def sample(self, key: Array, shape: tuple[int, int], dtype: np.dtype) -> Array:
        """Standard normal numbers."""
        return jax.random.normal(key, shape, dtype)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Epanechnikov:
    """K(z) = prod_k 3 / (4 sqrt 5) (1 - z_k^2 / 5)_+: of compact support, as the theory assumes."""

    name: str = "epanechnikov"
    cancels: bool = False

    def log_constant(self, d: int) -> float:
        """log K(0)."""
        return d * math.log(0.75 / math.sqrt(5.0))

    def exponents(self, a: Array, b: Array, level: Array, careful: bool) -> Array:
        """level_j + sum_k log(1 - (a_ik - b_jk)^2 / 5), -inf outside the support."""
        del careful
        factor = lambda x: jnp.maximum(1 - x * x / 5, 0)  # noqa: E731
        return level + _over_coordinates(lambda u: jnp.log(math.prod(map(factor, u))), a, b)

    def sample(self, key: Array, shape: tuple[int, int], dtype: np.dtype) -> Array:
        """Of three uniform numbers the last, unless it is the largest in size: then the second."""
        u = math.sqrt(5.0) * jax.random.uniform(key, (3, *shape), dtype, -1, 1)
        size = jnp.abs(u)
        return jnp.where(size[2] >= jnp.maximum(size[0], size[1]), u[1], u[2])


gaussian_kernel = Gaussian()
epanechnikov = Epanechnikov()


class Centres(NamedTuple):
    """Centres sorted by cluster, whitened by their own cluster's bandwidth; unused ones last."""

    z: Array  # (m, d)
    level: Array  # (m,) log-weight and normaliser; -inf where unused
    cluster: Array  # (m,) number of clusters where unused
    count: Array  # () centres in use


def _split(n: int, most: int) -> tuple[int, int]:
    """Number and size of equal blocks of at most `most` rows, with little left over."""
    number = max(-(-n // most), 1)
    return number, -(-n // number)


def _block_sizes() -> tuple[int, int]:
    """Points and centres in a block: what stays in a CPU's cache, or fills a GPU."""
    return (2048, 512) if jax.default_backend() == "cpu" else (4096, 4096)


def log_sum(shape: Shape, centres: Centres, whiten: Callable[[Array], Array], x: Array) -> Array:
    """log sum_j exp(level_j) K(z_i - z_j) / K(0) at the points x, (n,).

    Args:
        shape: the kernel.
        centres: whitened centres.
        whiten: (rows, d) points to (clusters, rows, d), each whitened by each cluster's bandwidth.
        x: points, (n, d).
    """
    n, (points, middle) = len(x), _block_sizes()
    rows, size = _split(n, points)
    number, width = _split(len(centres.z), middle)
    extra = number * width - len(centres.z)
    padded = Centres(
        jnp.pad(centres.z, ((0, extra), (0, 0))),
        jnp.pad(centres.level, (0, extra), constant_values=-jnp.inf),
        jnp.pad(centres.cluster, (0, extra), mode="edge"),
        centres.count,
    )
    x = jnp.pad(x, ((0, rows * size - n), (0, 0)), mode="edge").reshape(rows, size, -1)

    def all_rows(careful: bool) -> Array:
        return jax.lax.map(
            lambda block: _one_block(shape, padded, whiten(block), width, careful), x
        )

    if jnp.finfo(x.dtype).bits == 64 or not shape.cancels:
        return all_rows(False).ravel()[:n]
    used = jnp.isfinite(centres.level)
    largest = jnp.max(jnp.where(used, jnp.sum(centres.z**2, axis=1), 0))
    careful = largest * jnp.finfo(x.dtype).eps > CANCELLATION
    return jax.lax.cond(careful, partial(all_rows, True), partial(all_rows, False)).ravel()[:n]


def _one_block(shape: Shape, centres: Centres, z: Array, width: int, careful: bool) -> Array:
    """The log-sum at one block of points, z (clusters, rows, d), over all blocks of centres."""
    dtype, clusters = z.dtype, len(z)

    if clusters == 1 and width == len(centres.z):  # a single block
        return logsumexp(shape.exponents(z[0], centres.z, centres.level, careful), axis=1)

    def over_blocks(add: Callable, start: tuple, shift: ArrayLike) -> tuple:
        """Fold `add` over exponents less `shift`, for each pair of a block and a cluster in it."""

        def block(index: Array, total: tuple) -> tuple:
            part = jax.tree.map(
                lambda a: jax.lax.dynamic_slice_in_dim(a, index * width, width), centres[:3]
            )
            if clusters == 1:
                return add(total, shape.exponents(z[0], part[0], part[1] - shift, careful))

            def one(cluster: Array, total: tuple) -> tuple:
                level = jnp.where(part[2] == cluster, part[1] - shift, -jnp.inf)
                return add(total, shape.exponents(z[cluster], part[0], level, careful))

            last = jnp.minimum(part[2][-1] + 1, clusters)
            return jax.lax.fori_loop(part[2][0], last, one, total)

        return jax.lax.fori_loop(0, -(-centres.count // width), block, start)

    span = 0.7 * math.log(jnp.finfo(dtype).max)
    top = jnp.max(centres.level)
    shift = jnp.where(jnp.isfinite(top), top, 0) - span
    zero = jnp.zeros(z.shape[1], dtype)

    def plain(total: tuple, s: Array) -> tuple:
        return (total[0] + jnp.sum(jnp.exp(s), axis=1),)

    def running(total: tuple, s: Array) -> tuple:
        highest, sums = total
        new = jnp.maximum(highest, jnp.max(s, axis=1))
        # -inf - -inf is no number: rows that have met nothing yet are shifted by nothing.
        base = jnp.where(jnp.isneginf(new), 0, new)
        return new, sums * jnp.exp(highest - base) + jnp.sum(jnp.exp(s - base[:, None]), axis=1)

    def carefully() -> Array:
        highest, sums = over_blocks(running, (zero - jnp.inf, zero), 0)
        return jnp.where(jnp.isneginf(highest), -jnp.inf, highest + jnp.log(sums))

    (sums,) = over_blocks(plain, (zero,), shift)
    faint = sums < math.exp(-span)
    return jax.lax.cond(jnp.any(faint), carefully, lambda: jnp.log(sums) + shift)
