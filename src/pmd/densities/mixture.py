"""Small Gaussian mixtures: log-density, draws, weighted EM, and the number of components by BIC.

A mixture of K components stores log pi_k, the means and lower Cholesky factors; a component with
log pi_k = -inf is unused, so that mixtures of different sizes fit one compiled program. Everything
computes in the dtype it is given.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp, ndtri
from jax.typing import ArrayLike

FLOOR = 1e-10
RIDGE = 1e-4
GAIN = 1e-4

# Graphics cards would otherwise round the factors of float32 products to 11 bits.
dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Draws(NamedTuple):
    """Draws of a fitted density, with the log-density drawn from and the one meant."""

    theta: Array
    log_f: Array
    log_q: Array


class Mixture(NamedTuple):
    """Gaussian mixture sum_k pi_k N(mean_k, chol_k chol_k'): shapes (K,), (K, d), (K, d, d)."""

    log_pi: Array
    mean: Array
    chol: Array


def single(mean: Array, chol: Array) -> Mixture:
    """The mixture of one component."""
    return Mixture(jnp.zeros(1, mean.dtype), mean[None], chol[None])


def num_components(mix: Mixture) -> int:
    """Components in use."""
    return int(np.isfinite(np.asarray(mix.log_pi)).sum())


def inverse_of(chol: Array) -> Array:
    """Inverse of lower triangular factors; multiplying by it beats solving for many points."""
    eye = jnp.eye(chol.shape[-1], dtype=chol.dtype)
    return solve_triangular(chol, jnp.broadcast_to(eye, chol.shape), lower=True)


def _parts(mix: Mixture, xt: Array) -> Array:
    """log pi_k + log N(x | k), shape (K, n), for centred points as columns, (d, n)."""
    num, d = mix.mean.shape
    inverse = inverse_of(mix.chol)
    shift = dot(inverse, mix.mean[:, :, None])[:, :, 0]
    z = dot(inverse.reshape(num * d, d), xt).reshape(num, d, -1) - shift[:, :, None]
    level = mix.log_pi - jnp.sum(jnp.log(jnp.diagonal(mix.chol, axis1=1, axis2=2)), 1)
    return (level - 0.5 * d * math.log(2 * math.pi))[:, None] - 0.5 * jnp.sum(z * z, axis=1)


@jax.jit
def component_log_prob(mix: Mixture, x: Array) -> Array:
    """log pi_k + log N(x_n | mean_k, cov_k), shape (n, K); the points are centred first."""
    centre = jnp.mean(mix.mean, axis=0)
    return _parts(mix._replace(mean=mix.mean - centre), (x - centre).T).T


@jax.jit
def log_prob(mix: Mixture, x: Array) -> Array:
    """log sum_k pi_k N(x_n | mean_k, cov_k), shape (n,)."""
    return logsumexp(component_log_prob(mix, x), axis=1)


@jax.jit
def transport(mix: Mixture, u: Array) -> Array:
    """Map points of the unit cube to draws: u[:, 0] picks the component, u[:, 1:] the place in it.

    u: (n, d + 1) in (0, 1); returns (n, d).
    """
    # In float32 the largest number below one is all that keeps ndtri finite.
    u = jnp.clip(u, 1e-9, 1 - 0.5 * jnp.finfo(u.dtype).eps)
    edges = jnp.cumsum(jnp.exp(mix.log_pi - logsumexp(mix.log_pi)))
    last = jnp.max(jnp.where(jnp.isfinite(mix.log_pi), jnp.arange(len(edges)), 0))
    which = jnp.minimum(jnp.searchsorted(edges, u[:, 0], side="right"), last)
    return place(which, ndtri(u[:, 1:]), mix.mean, mix.chol)


def place(which: Array, z: Array, mean: Array, chol: Array) -> Array:
    """mean_k + chol_k z_i with k = which_i, row by row; 0 where there is no such k."""
    if len(mean) == 1:
        return jnp.where((which == 0)[:, None], mean + dot(z, chol[0].T), 0)

    def one(x: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        index, mean, chol = part
        return jnp.where((which == index)[:, None], mean + dot(z, chol.T), x), None

    return jax.lax.scan(one, jnp.zeros_like(z), (jnp.arange(len(mean)), mean, chol))[0]


@partial(jax.jit, static_argnames="n")
def sample(key: Array, mix: Mixture, n: int) -> Array:
    """n draws, (n, d), in random order; the numbers per component are stratified."""
    one, two, three = jax.random.split(key, 3)
    u = jax.random.uniform(one, (n, mix.mean.shape[1] + 1), mix.mean.dtype)
    strata = (jnp.arange(n) + jax.random.uniform(two, (n,), mix.mean.dtype)) / n
    return transport(mix, u.at[:, 0].set(jax.random.permutation(three, strata)))


@partial(jax.jit, static_argnames="floor")
def moments(x: Array, w: Array, floor: float = FLOOR) -> tuple[Array, Array]:
    """Weighted mean and lower Cholesky factor of the weighted covariance, never NaN.

    The floor acts on the correlation matrix, C + max(floor, 8 d eps) I, whatever the units of the
    coordinates. A coordinate constant up to rounding is taken for uncorrelated, with the variance
    floor * (mean variance) + (8 eps mean)^2 + sqrt(tiny), eps and tiny those of the dtype.
    Weights must sum to one; points of zero weight count for nothing.
    """
    d, info = x.shape[1], jnp.finfo(x.dtype)
    # Two passes: the sum of products of uncentred points would cancel in float32.
    x = jnp.where(w[:, None] > 0, x, 0)
    guess = dot(w, x)
    r = jnp.where(w[:, None] > 0, x - guess, 0)
    shift = dot(w, r)
    cov = dot((r * w[:, None]).T, r) - shift[:, None] * shift
    var = jnp.diagonal(cov)
    rounding = (8 * info.eps * guess) ** 2 + float(info.tiny) ** 0.5
    constant = var <= rounding
    sd = jnp.sqrt(jnp.where(constant, floor * jnp.mean(var) + rounding, var))
    eye = jnp.eye(d, dtype=x.dtype)
    correlation = jnp.where(constant[:, None] | constant, eye, cov / sd[:, None] / sd)
    chol = jnp.linalg.cholesky(correlation + max(floor, 8 * d * float(info.eps)) * eye)
    return guess + shift, sd[:, None] * chol


@jax.jit
def em(
    x: Array, w: Array, mix: Mixture, cov0: Array, steps: ArrayLike, target: ArrayLike = -np.inf
) -> tuple[Mixture, Array]:
    """Weighted expectation-maximisation; every covariance gets 1e-4 cov0 on top.

    Stops after `steps`, or when the weighted mean log-likelihood gains less than 1e-4, or, after
    five steps, when not even gains of three times the present size would take it to `target`.
    Returns the mixture and its weighted mean log-likelihood.
    """
    num, d = mix.mean.shape
    live = w > 0
    centre = dot(w, jnp.where(live[:, None], x, 0))
    x = jnp.where(live[:, None], x - centre, 0)
    xt, used = x.T, jnp.isfinite(mix.log_pi)

    def expect(mix: Mixture) -> tuple[Array, Array]:
        parts = _parts(mix, xt)
        total = logsumexp(parts, axis=0)
        return jnp.exp(parts - total) * w, dot(w, total)

    def maximise(share: Array) -> Mixture:
        pi = jnp.sum(share, axis=1) + 1e-12
        mean = dot(share, x) / pi[:, None]
        second = dot((share[:, None] * xt).reshape(num * d, -1), x).reshape(num, d, d)
        cov = second / pi[:, None, None] - mean[:, :, None] * mean[:, None] + RIDGE * cov0
        log_pi = jnp.where(used, jnp.log(pi / jnp.sum(jnp.where(used, pi, 0))), -jnp.inf)
        return Mixture(log_pi, mean, jnp.linalg.cholesky(cov))

    def going(state: tuple) -> Array:
        step, _, _, gain, level = state
        hopeless = (step >= 5) & (level + 3 * (steps - step) * gain < target)
        return (step < steps) & (gain >= GAIN) & ~hopeless

    def advance(state: tuple) -> tuple:
        step, mix, share, _, old = state
        mix = maximise(share)
        share, level = expect(mix)
        return step + 1, mix, share, level - old, level

    mix = mix._replace(mean=mix.mean - centre)
    share, level = expect(mix)
    state = (jnp.zeros((), jnp.int32), mix, share, jnp.full((), jnp.inf, x.dtype), level)
    _, mix, _, _, level = jax.lax.while_loop(going, advance, state)
    return mix._replace(mean=mix.mean + centre), level


def _seeds(key: Array, z: Array, w: Array, num: int, count: ArrayLike) -> Mixture:
    """k-means++ in whitened coordinates: each centre far from those before it; `count` in use."""
    d, dtype = z.shape[1], z.dtype

    def pick(mass: Array, u: Array) -> Array:
        edges = jnp.cumsum(mass)
        return z[jnp.clip(jnp.searchsorted(edges, u * edges[-1], side="right"), 0, len(z) - 1)]

    def follow(near: Array, u: Array) -> tuple[Array, Array]:
        centre = pick(jnp.where(near < jnp.inf, near, 1) * w, u)
        return jnp.minimum(near, jnp.sum((z - centre) ** 2, axis=1)), centre

    u = jax.random.uniform(key, (num,), dtype)
    _, mean = jax.lax.scan(follow, jnp.full(len(z), jnp.inf, dtype), u)
    log_pi = jnp.where(jnp.arange(num) < count, -jnp.log(jnp.asarray(count, dtype)), -jnp.inf)
    scale = 1 / jnp.sqrt(jnp.asarray(count, dtype))
    return Mixture(log_pi, mean, scale * jnp.broadcast_to(jnp.eye(d, dtype=dtype), (num, d, d)))


@partial(jax.jit, static_argnames=("starts", "steps"))
def _best_of(
    key: Array, z: Array, w: Array, num: ArrayLike, start: Mixture, target: ArrayLike,
    starts: int, steps: int,
) -> tuple[Mixture, Array]:  # fmt: skip
    """The best of `starts` runs of EM in whitened coordinates, the first from `start` if in use."""
    eye = jnp.eye(z.shape[1], dtype=z.dtype)

    def attempt(index: Array) -> tuple[Mixture, Array]:
        seeds = _seeds(jax.random.fold_in(key, index), z, w, len(start.log_pi), num)
        warm = jnp.any(jnp.isfinite(start.log_pi)) & (index == 0)
        mix = jax.tree.map(lambda a, b: jnp.where(warm, a, b), start, seeds)
        return em(z, w, mix, eye, jnp.where(warm, 15, steps), target=target)

    mixes, levels = jax.lax.map(attempt, jnp.arange(starts))
    best = jnp.argmax(levels)
    return jax.tree.map(lambda a: a[best], mixes), levels[best]


@partial(jax.jit, static_argnames="size")
def _prepare(key: Array, x: Array, w: Array, *, size: int) -> tuple[Array, ...]:
    """Moments, and `size` live points, whitened; their weights, effective number and L_1."""
    d = x.shape[1]
    w = w / jnp.sum(w)
    mean, chol = moments(x, w)
    if size < len(x):
        # Rows of zero weight come last, so that padding never displaces a particle.
        order = jnp.where(w > 0, jax.random.uniform(key, w.shape), -1.0)
        chosen = jax.lax.top_k(order, size)[1]
        x, w = x[chosen], w[chosen] / jnp.sum(w[chosen])
    z = dot(jnp.where(w[:, None] > 0, x - mean, 0), inverse_of(chol).T)
    # K = 1 gets the same ridge as every other K, or constant coordinates would speak for K = 2.
    centre, eye = dot(w, z), jnp.eye(d, dtype=z.dtype)
    cov = dot((z * w[:, None]).T, z) - centre[:, None] * centre + RIDGE * eye
    level = dot(w, _parts(single(centre, jnp.linalg.cholesky(cov)), z.T)[0])
    return mean, chol, z, w, 1 / jnp.sum(w * w), level


def _coloured(mix: Mixture, mean: Array, chol: Array) -> Mixture:
    """A mixture of z as the mixture of mean + chol z."""
    return Mixture(mix.log_pi, mean + dot(mix.mean, chol.T), dot(chol, mix.chol))


def _price(n: ArrayLike, num: ArrayLike, d: int) -> Array:
    """What BIC charges: 1/2 log n for each parameter of `num` Gaussians and their weights."""
    parameters = jnp.asarray(num * (1 + d + d * (d + 1) / 2) - 1, jnp.result_type(n))
    return 0.5 * jnp.log(n) * parameters


def _roomy(n: int) -> int:
    """The next of 512, 768, 1024, 1536, ...: few sizes are ever compiled."""
    size = 512
    while size < n:
        size = size * 3 // 2 if size.bit_count() == 1 else size * 4 // 3
    return size


def _room(mix: Mixture, num: int, mean: Array, chol: Array) -> Mixture:
    """A mixture of x as one of chol^-1 (x - mean), with unused components up to `num` of them."""
    mix = jax.tree.map(lambda a: jnp.asarray(a, mean.dtype), mix)
    inverse = inverse_of(chol)
    mix = Mixture(mix.log_pi, dot(mix.mean - mean, inverse.T), dot(inverse, mix.chol))
    blank = _blank(num - len(mix.log_pi), mix.mean)
    return Mixture(*(jnp.concatenate(pair) for pair in zip(mix, blank, strict=True)))


def _blank(num: int, z: Array) -> Mixture:
    """`num` standard components, none in use."""
    d, dtype = z.shape[1], z.dtype
    eye = jnp.broadcast_to(jnp.eye(d, dtype=dtype), (num, d, d))
    return Mixture(jnp.full(num, -jnp.inf, dtype), jnp.zeros((num, d), dtype), eye)


def clusters(
    key: Array,
    x: ArrayLike,
    w: ArrayLike,
    *,
    effective: float | None = None,
    start: Mixture | None = None,
    most: int = 8,
    subset: int = 3000,
    starts: int = 4,
    steps: int = 40,
) -> Mixture:
    """Weighted Gaussian mixture with the number of components chosen by BIC, one allowed.

    BIC(K) = n L_K - 1/2 log(n) (K (1 + d + d (d + 1) / 2) - 1), with L_K the weighted mean
    log-likelihood and n the effective number of points. K grows from 1 until two in a row bring
    nothing, or a component would have fewer than 3 (d + 1) effective points.

    Args:
        key: a JAX key.
        x: points, (n, d).
        w: their weights, (n,), zero for points to ignore.
        effective: effective number of points; by default 1 / sum(w^2) of those EM sees.
        start: an earlier mixture, one of the starts where its size comes up.
        most: largest number of components.
        subset: EM runs on about this many points, and three steps on all at the end.
        starts, steps: runs of EM from different k-means++ seeds, and steps in each.

    Example:
        >>> import jax
        >>> from pmd.densities import mixture
        >>> one, two = jax.random.split(jax.random.key(0))
        >>> x = jax.random.normal(one, (1000, 2)).at[:500].add(6.0)
        >>> mixture.num_components(mixture.clusters(two, x, jax.numpy.full(1000, 1e-3)))
        2
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    live, d = x.shape
    more = _roomy(live) - live
    x, w = jnp.pad(x, ((0, more), (0, 0))), jnp.pad(w, (0, more))
    key, pick = jax.random.split(key)
    mean, chol, z, v, count, level = _prepare(pick, x, w, size=min(len(x), _roomy(subset)))
    n = float(count) if effective is None else float(effective)
    top, bad, best, size = n * float(level) - float(_price(n, 1, d)), 0, None, 1
    for num in range(2, most + 1):
        if n < 3 * num * (d + 1) or bad == 2:
            break
        room = min(3, most) if num <= 3 else most
        warm = start is not None and len(start.log_pi) == num
        first = _room(start, room, mean, chol) if start is not None and warm else _blank(room, z)
        price = float(_price(n, num, d))
        step, target = jax.random.fold_in(key, num), (top + price) / n
        found, gained = _best_of(step, z, v, num, first, target, starts, steps)
        score = n * float(gained) - price
        bad = 0 if score > top else bad + 1
        if score > top:
            top, best, size = score, found, num
    if best is None:
        return single(mean, chol)
    best = _coloured(best, mean, chol)
    if len(z) < len(x):
        best = em(x, w / jnp.sum(w), best, dot(chol, chol.T), 3)[0]
    return Mixture(*(part[:size] for part in best))


@partial(jax.jit, static_argnames=("most", "subset", "starts"))
def clusters_jittable(
    key: Array, x: Array, w: Array, most: int = 4, subset: int = 3000, starts: int = 4
) -> Mixture:
    """`clusters` as one traceable program, with `most` components; unused: log pi = -inf."""
    d = x.shape[1]
    key, pick = jax.random.split(key)
    mean, chol, z, v, n, level = _prepare(pick, x, w, size=min(len(x), subset))
    first = _blank(most, z)
    one = first._replace(log_pi=first.log_pi.at[0].set(0.0))

    def going(state: tuple) -> Array:
        num, bad, _, _ = state
        return (num <= most) & (bad < 2) & (n >= 3 * num * (d + 1))

    def grow(state: tuple) -> tuple:
        num, bad, top, best = state
        step, target = jax.random.fold_in(key, num), (top + _price(n, num, d)) / n
        found, gained = _best_of(step, z, v, num, first, target, starts, 40)
        score = n * gained - _price(n, num, d)
        better = score > top
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), found, best)
        return num + 1, jnp.where(better, 0, bad + 1), jnp.maximum(score, top), best

    begin = (jnp.asarray(2, jnp.int32), jnp.asarray(0, jnp.int32), n * level - _price(n, 1, d), one)
    best = jax.lax.while_loop(going, grow, begin)[3]
    return _coloured(best, mean, chol)


@partial(jax.jit, static_argnames=("spread", "wide"))
def widen(mix: Mixture, spread: float, wide: float, mean0: Array, chol0: Array) -> Mixture:
    """The mixture to draw from: a little wider than the one meant, and small modes levelled up.

    Covariances times 1 + a, a = sqrt(spread / d); weights (1 - wide) (.7 pi_k + .3 / K); and a
    component of weight `wide` over everything, N(mean0, (1 + 3 a) chol0 chol0').
    """
    a = math.sqrt(spread / mix.mean.shape[1])
    used = jnp.isfinite(mix.log_pi)
    pi = (1 - wide) * jnp.where(used, 0.7 * jnp.exp(mix.log_pi) + 0.3 / jnp.sum(used), 0)
    wider = Mixture(jnp.log(pi), mix.mean, math.sqrt(1 + a) * mix.chol)
    if wide == 0:
        return wider
    share = jnp.full_like(pi[:1], math.log(wide))
    over = Mixture(share, mean0[None], math.sqrt(1 + 3 * a) * chol0[None])
    return Mixture(*(jnp.concatenate(pair) for pair in zip(wider, over, strict=True)))


def sobol(seed: int, n: int, dim: int) -> np.ndarray:
    """n scrambled Sobol points in (0, 1)^dim, float64, kept 1e-9 off the faces."""
    from scipy.stats import qmc

    points = qmc.Sobol(dim, rng=np.random.default_rng(seed)).random_base2((n - 1).bit_length())
    return np.clip(points[:n], 1e-9, 1 - 1e-9)
