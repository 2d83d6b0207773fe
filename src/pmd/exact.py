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

NEAR = 0.7  # share of proposals along differences between neighbours, so that modes keep to themselves
CANDIDATES = 12  # among which the nearest counts as a neighbour
ACCEPTANCE = 0.25  # that the scale of the proposals is steered to
MOVED, TRAVELLED = 0.95, 2.0  # a walk ends when this share moved, and this many steps were accepted each


class Iterate(NamedTuple):
    """The exact iterate: its row weights, where they are not zero, and what is left of the start."""

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
    first = Walk(
        begin, log_q, jnp.zeros(count, bool), jnp.ones((), kind), zero,
        jnp.zeros((), jnp.int32), zero, jnp.mean(log_q - state.log_q[ancestors]), sums.bad,
    )  # fmt: skip

    def going(w: Walk) -> Array:
        arrived = (jnp.mean(w.moved) > MOVED) & (w.travelled > TRAVELLED)
        return (w.sweeps < most) & ~arrived & (w.bad == 0)

    def sweep(w: Walk) -> Walk:
        sweep_key = jax.random.fold_in(key, w.sweeps + 1)
        order_key, *half_keys = jax.random.split(sweep_key, 3)
        order = jax.random.permutation(order_key, count)
        chol = whitening(w.theta)
        rate = zero
        for mine, others, k in (
            (order[: count // 2], order[count // 2 :], half_keys[0]),
            (order[count // 2 :], order[: count // 2], half_keys[1]),
        ):
            w, accepted = half_sweep(flat, blocks, k, w, it, rows, mine, others, chol)
            rate = rate + accepted / 2
        return w._replace(
            scale=w.scale * jnp.exp(rate - ACCEPTANCE),
            travelled=w.travelled + rate,
            sweeps=w.sweeps + 1,
            acceptance=rate,
        )

    end = jax.lax.while_loop(going, sweep, first)
    return end, flat.log_prior(end.theta)


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
    mine: Array,
    others: Array,
    chol: Array,
) -> tuple[Walk, Array]:
    """Propose and decide for one half; returns the accepted share of the neighbourly proposals.

    The increment is drawn from the other half alone, with a random sign, so it is symmetric.
    """
    n, d = len(mine), w.theta.shape[1]
    keys = jax.random.split(key, 9)
    pick = partial(jax.random.randint, minval=0, maxval=len(others))
    a = others[pick(keys[0], (n,))]
    some = others[pick(keys[1], (n, CANDIDATES))]
    white = w.theta @ chol
    apart = jnp.sum((white[some] - white[a][:, None]) ** 2, axis=-1)
    nearest = jnp.argmin(jnp.where(apart > 0, apart, jnp.inf), axis=1)
    near = jax.random.uniform(keys[2], (n,)) < NEAR
    b = jnp.where(near, some[jnp.arange(n), nearest], some[:, 0])
    usual = w.scale * 2.38 / jnp.sqrt(2.0 * d)
    jump = jax.random.uniform(keys[3], (n,)) < 0.3  # whole differences: from mode to mode
    size = jnp.where(near, 1.5 * usual, jnp.where(jump, 1.0, usual))
    size = size * jnp.exp(0.3 * jax.random.normal(keys[4], (n,), w.theta.dtype))
    size = size * jnp.where(jax.random.bernoulli(keys[5], 0.5, (n,)), 1.0, -1.0)
    rough = 1 + 0.05 * jax.random.normal(keys[6], (n, d), w.theta.dtype)
    proposal = w.theta[mine] + size[:, None] * (w.theta[a] - w.theta[b]) * rough
    everyone = jnp.asarray(n, jnp.int32)
    value, _, sums = log_density(flat, blocks, it, rows, proposal, everyone)
    log_u = jnp.log(jax.random.uniform(keys[7], (n,), w.theta.dtype))
    accept = log_u < value - w.log_q[mine]
    accepted = jnp.sum(accept & near) / jnp.maximum(jnp.sum(near), 1)
    return w._replace(
        theta=w.theta.at[mine].set(jnp.where(accept[:, None], proposal, w.theta[mine])),
        log_q=w.log_q.at[mine].set(jnp.where(accept, value, w.log_q[mine])),
        moved=w.moved.at[mine].set(w.moved[mine] | accept),
        bad=w.bad + sums.bad,
    ), accepted.astype(w.theta.dtype)
