"""Log-weights: normalising, effective numbers, flattening. Works on NumPy and JAX arrays alike."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def normalise(log_w: ArrayLike) -> Array:
    """Weights that sum to one: w_i = exp(log w_i) / sum_j exp(log w_j)."""
    return jax.nn.softmax(jnp.asarray(log_w))


def ess(log_w: ArrayLike) -> Array:
    """Effective number of particles, (sum w)^2 / sum w^2; 0 where every weight is zero."""
    log_w = jnp.asarray(log_w)
    top = jnp.max(log_w)
    w = jnp.exp(log_w - jnp.where(jnp.isfinite(top), top, 0.0))
    return jnp.sum(w) ** 2 / jnp.maximum(jnp.sum(w * w), jnp.finfo(w.dtype).tiny)


def bisect(accept: Callable[[Array], Array], top: ArrayLike, iterations: int = 40) -> Array:
    """The largest x in [0, top] with accept(x), for an `accept` that is true up to some point."""
    top = jnp.asarray(top)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        good = accept(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low, _ = jax.lax.fori_loop(0, iterations, halve, (jnp.zeros_like(top), top))
    return jnp.where(accept(top), top, low)


def temper(log_w: ArrayLike, floor: ArrayLike) -> Array:
    """Normalised weights, flattened to w^b, b <= 1, until their effective number is `floor`."""
    log_w = jnp.asarray(log_w)
    log_w = log_w - jnp.max(log_w)
    power = bisect(lambda b: ess(scaled(log_w, b)) >= floor, jnp.ones((), log_w.dtype))
    return normalise(scaled(log_w, power))


def scaled(log_w: Array, power: ArrayLike) -> Array:
    """power * log_w, with weights of zero staying zero at every power."""
    zero = jnp.isneginf(log_w)
    return jnp.where(zero, -jnp.inf, power * jnp.where(zero, 0.0, log_w))
