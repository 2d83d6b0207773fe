"""The exact iterate: what log q is as a function, whatever the particles do.

    log q_t(theta)  =  a log start(theta) + (1 - a) log p(theta) + sum_n c_n log p(x_n | theta)

It can be evaluated anywhere for the price of the rows seen so far: cheap while few have been
seen, and needless when many have and log q is smooth.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import logsumexp

from pmd.likelihood import Blocks, Sums, sum_rows, weighted_rows
from pmd.mirror import State, log_weights
from pmd.problem import Flat

PyTree = Any

NEAR = (
    0.7  # share of proposals along differences between neighbours, so that modes keep to themselves
)
WHOLE = 0.3  # share of the other proposals that are whole differences: from mode to mode
CANDIDATES = 12  # among which the nearest counts as a neighbour
ACCEPTANCE = 0.25  # that the scale of the proposals is steered to
MOVED, TRAVELLED = (
    0.95,
    2.0,
)  # a walk ends when this share moved, and this many steps were accepted each


class Iterate(NamedTuple):
    """The exact iterate: row weights, where they are not zero, and what is left of the start."""

    row_weights: Array  # (N,) c_n
    index: Array  # (N,) rows, those seen first
    seen: Array  # how many have been seen
    start_weight: Array
    reference: Array


@jax.jit
def iterate(state: State) -> Iterate:
    """The exact iterate that a state stands for."""
    weights = state.scale * state.row_weights
    index = jnp.argsort(weights <= 0, stable=True).astype(jnp.int32)
    seen = jnp.sum(weights > 0, dtype=jnp.int32)
    return Iterate(weights, index, seen, state.start_weight, state.reference)


@jax.jit
def posterior_iterate(state: State) -> Iterate:
    """The iterate in which every row counts once: the posterior itself."""
    num_data = len(state.row_weights)
    ones = jnp.ones(num_data, state.row_weights.dtype)
    everything = jnp.asarray(num_data, jnp.int32)
    none = jnp.zeros((), state.row_weights.dtype)
    return Iterate(ones, jnp.arange(num_data, dtype=jnp.int32), everything, none, state.reference)


def prior_part(flat: Flat, it: Iterate, theta: Array) -> tuple[Array, Array]:
    """a log start + (1 - a) log p at many vectors, and log p itself."""
    log_prior = flat.log_prior(theta)
    if flat.problem.start is None:
        return log_prior, log_prior
    a = it.start_weight
    start = jnp.where(a > 0, a * flat.log_start(theta), 0.0)
    return start + jnp.where(a < 1, (1 - a) * log_prior, 0.0), log_prior


@partial(jax.jit, static_argnames=("flat", "blocks"))
def log_density(
    flat: Flat, blocks: Blocks, it: Iterate, rows: PyTree, theta: Array, count: Array
) -> tuple[Array, Array, Sums]:
    """The exact log q (relative to the reference's likelihood), log p, and the sums over rows."""
    n = len(theta)
    padding = jnp.broadcast_to(theta[:1], (blocks.capacity(n) - n, theta.shape[1]))
    fetch, num = weighted_rows(rows, it.index, it.seen, it.row_weights, blocks.rows)
    sums = sum_rows(
        flat, jnp.concatenate([theta, padding]), count, it.reference, fetch, num, blocks.particles
    )
    prior, log_prior = prior_part(flat, it, theta)
    return prior + sums.value[:n], log_prior, sums


class Walk(NamedTuple):
    """Particles that walk, and how it goes."""

    theta: Array  # (M, d)
    log_q: Array  # (M,) exact, relative to the reference
    moved: Array  # (M,) has left where it began
    scale: Array
    travelled: Array  # accepted share, added up over sweeps
    sweeps: Array
    acceptance: Array
    offset: Array  # of log_q: the running log-normaliser, relative to the reference
    bad: Array
    culprit: Array  # (d,) the first vector at which the likelihood was NaN or +inf, if `bad`


def resample(key: Array, log_w: Array, count: int) -> Array:
    """Systematic resampling by inverse cumulative weights: `count` ancestors, in random order."""
    first, second = jax.random.split(key)
    w = jnp.exp(log_w - logsumexp(log_w))
    total = jax.lax.cummax(jnp.cumsum(w))
    u = (jnp.arange(count) + jax.random.uniform(first)) / count
    ancestors = jnp.searchsorted(total, u.astype(w.dtype) * total[-1])
    return jax.random.permutation(second, jnp.clip(ancestors, 0, len(log_w) - 1))


@partial(jax.jit, static_argnames=("flat", "blocks", "count", "most"))
def walk(
    flat: Flat,
    blocks: Blocks,
    key: Array,
    state: State,
    it: Iterate,
    rows: PyTree,
    count: int,
    most: int = 30,
) -> tuple[Walk, Array]:
    """Resample to `count` particles and walk under the exact iterate.

    Differential-evolution Metropolis in two halves: a particle of one half proposes to move along
    the difference of two of the other, mostly neighbours; until nearly all have moved several
    times, at most `most` sweeps.  The second value is log p at the particles.
    """
    ancestors = resample(key, log_weights(state), count)
    begin = state.theta[ancestors]
    everyone = jnp.asarray(count, jnp.int32)
    log_q, _, sums = log_density(flat, blocks, it, rows, begin, everyone)
    kind = begin.dtype
    zero = jnp.zeros((), kind)
    gap = log_q - state.log_q[ancestors]
    known = jnp.isfinite(gap)  # a fit may have drawn what turns out to be impossible
    offset = jnp.sum(jnp.where(known, gap, 0.0)) / jnp.maximum(jnp.sum(known), 1)
    first = Walk(
        begin, log_q, jnp.zeros(count, bool), jnp.ones((), kind), zero,
        jnp.zeros((), jnp.int32), zero, offset, sums.bad, begin[jnp.argmax(not_below_inf(log_q))],
    )  # fmt: skip

    def going(w: Walk) -> Array:
        arrived = (jnp.mean(w.moved) > MOVED) & (w.travelled > TRAVELLED)
        return (w.sweeps < most) & ~arrived & (w.bad == 0)

    def sweep(w: Walk) -> Walk:
        order_key, half_key = jax.random.split(jax.random.fold_in(key, w.sweeps + 1))
        order = jax.random.permutation(order_key, count)
        chol = whitening(w.theta)

        def half(k: Array, carry: tuple[Walk, Array]) -> tuple[Walk, Array]:
            w, rate = carry
            turned = jnp.roll(order, k * (count // 2))
            half_sweep_key = jax.random.fold_in(half_key, k)
            w, accepted = half_sweep(flat, blocks, half_sweep_key, w, it, rows, turned, chol)
            return w, rate + accepted / 2

        w, rate = jax.lax.fori_loop(0, 2, half, (w, zero))
        return w._replace(
            scale=w.scale * jnp.exp(rate - ACCEPTANCE),
            travelled=w.travelled + rate,
            sweeps=w.sweeps + 1,
            acceptance=rate,
        )

    end = jax.lax.while_loop(going, sweep, first)
    return end, flat.log_prior(end.theta)


def not_below_inf(x: Array) -> Array:
    """Where numbers are NaN or +inf."""
    return ~(x < jnp.inf)


def whitening(theta: Array) -> Array:
    """A matrix that whitens the particles: theta @ matrix has unit covariance."""
    d = theta.shape[1]
    centred = theta - jnp.mean(theta, axis=0)
    cov = centred.T @ centred / len(theta)
    floor = 1e-6 * jnp.diagonal(cov) + jnp.finfo(theta.dtype).tiny
    chol = jnp.linalg.cholesky(cov + jnp.diag(floor))
    eye = jnp.eye(d, dtype=theta.dtype)
    return jax.scipy.linalg.solve_triangular(chol, eye, lower=True).T


def half_sweep(
    flat: Flat,
    blocks: Blocks,
    key: Array,
    w: Walk,
    it: Iterate,
    rows: PyTree,
    order: Array,
    chol: Array,
) -> tuple[Walk, Array]:
    """Propose and decide for the first half of `order`; the accepted share of near proposals.

    The increment is drawn from the other half alone, with a random sign, so it is symmetric.
    """
    n, d = len(order) // 2, w.theta.shape[1]
    mine, others = order[:n], order[n:]
    kind = w.theta.dtype
    uniform_key, normal_key = jax.random.split(key)
    u = jax.random.uniform(uniform_key, (n, 5 + CANDIDATES), kind)
    z = jax.random.normal(normal_key, (n, 1 + d), kind)
    pick = jnp.minimum((u[:, 4:] * len(others)).astype(jnp.int32), len(others) - 1)
    a, some = others[pick[:, 0]], others[pick[:, 1:]]
    white = w.theta @ chol
    apart = jnp.sum((white[some] - white[a][:, None]) ** 2, axis=-1)
    nearest = jnp.argmin(jnp.where(apart > 0, apart, jnp.inf), axis=1)
    near = u[:, 0] < NEAR
    b = jnp.where(near, some[jnp.arange(n), nearest], some[:, 0])
    usual = w.scale * 2.38 / jnp.sqrt(2.0 * d).astype(kind)
    whole = u[:, 1] < WHOLE
    size = jnp.where(near, 1.5 * usual, jnp.where(whole, 1.0, usual))
    size = size * jnp.exp(0.3 * z[:, 0]) * jnp.where(u[:, 2] < 0.5, 1.0, -1.0)
    apart_by = (w.theta[a] - w.theta[b]) * (1 + 0.05 * z[:, 1:])
    proposal = w.theta[mine] + size[:, None] * apart_by
    everyone = jnp.asarray(n, jnp.int32)
    value, _, sums = log_density(flat, blocks, it, rows, proposal, everyone)
    accept = jnp.log(u[:, 3]) < value - w.log_q[mine]
    accepted = jnp.sum(accept & near) / jnp.maximum(jnp.sum(near), 1)
    return w._replace(
        theta=w.theta.at[mine].set(jnp.where(accept[:, None], proposal, w.theta[mine])),
        log_q=w.log_q.at[mine].set(jnp.where(accept, value, w.log_q[mine])),
        moved=w.moved.at[mine].set(w.moved[mine] | accept),
        bad=w.bad + sums.bad,
        culprit=jnp.where(w.bad > 0, w.culprit, proposal[jnp.argmax(not_below_inf(value))]),
    ), accepted.astype(kind)
