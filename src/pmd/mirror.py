"""The recursion: mirror descent on densities, carried at particles (the paper's section 2).

With g the mixing fraction (the paper's gamma_t), one step is equation `solve_exact_prox`,

    q_{t+1}(theta)  =  q_t(theta)^(1-g)  [ p(theta) prod_b p(x_b | theta)^(N/B) ]^g  /  Z,

done on log q at the particles.  The weights are w_i = q(theta_i) / p0(theta_i), p0 the density the
particles were drawn from, so the same lines serve weighted particles (the paper's strategy 1, p0
the prior), particles drawn anew at every step (strategy 2, p0 the last estimate) and anything
between.  The exact iterate is known as a function whatever the particles do,

    log q_t(theta)  =  a log start(theta) + (1 - a) log p(theta) + sum_n c_n log p(x_n | theta),

a = prod (1 - g) and one weight c_n a row, kept as a number times a vector so that a step touches
only its batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import logsumexp

from pmd.likelihood import Blocks, Sums, sum_rows, take, window
from pmd.problem import Flat
from pmd.weights import bisect, ess

PyTree = Any


class State(NamedTuple):
    """Particles and what is known of the density at them.

    Arrays may be longer than `count`: unused rows have log_q = -inf, a weight of zero.
    """

    theta: Array  # (m, d) particles, flat and unconstrained
    log_q: Array  # (m,) log q_t at the particles; normalised as far as the particles know
    log_p0: Array  # (m,) log-density of what the particles were drawn from
    log_prior: Array  # (m,)
    count: Array  # particles in use
    row_weights: Array  # (N,) c_n / scale
    scale: Array
    start_weight: Array  # a = prod (1 - g): what is left of the start
    reference: Array  # (d,) a vector near the particles, for accurate sums
    log_evidence: Array  # log of the integral of the unnormalised iterate
    visited: Array  # rows visited
    t: Array  # steps taken
    exact: Array  # whether log_q at the particles is the exact iterate, not what a fit says of it


class Info(NamedTuple):
    """What a step did."""

    step_size: Array  # g used
    planned: Array  # g asked for; larger where the guard stepped in
    ess: Array  # effective sample size after the step
    log_normaliser: Array  # log Z of the step, relative to the reference's likelihood
    reference: Array  # g (N/B) sum_b log p(x_b | reference), in two parts: add them in float64
    reference_rest: Array
    batch_size: Array
    bad: Array  # NaN or +inf log-likelihoods met: if any, the step was not taken


class Batch(NamedTuple):
    """A minibatch: rows, their numbers in the data, and which of them count.

    A last short batch is padded to the common size and masked, so that it neither recompiles nor
    weighs wrong.
    """

    rows: PyTree
    index: Array
    mask: Array


def log_weights(state: State) -> Array:
    """log w_i = log q_t(theta_i) - log p0(theta_i), -inf for rows not in use."""
    return state.log_q - state.log_p0


def initial(flat: Flat, key: Array, count: Array, capacity: int, num_rows: int) -> State:
    """Particles from the start (the prior unless `start=` was given), equally weighted.

    `num_rows` is the number of rows whose weights are kept: those in the data, or none for rows
    that cannot be read again.
    """
    theta = flat.sample(key, jnp.arange(capacity))
    log_p0, log_prior = flat.log_start(theta), flat.log_prior(theta)
    kind = theta.dtype
    live = jnp.arange(capacity) < count
    log_q = jnp.where(live, log_p0, -jnp.inf)
    best = jnp.argmax(jnp.where(live & jnp.isfinite(log_prior), log_prior, -jnp.inf))
    return State(
        theta=theta,
        log_q=log_q,
        log_p0=jnp.where(live, log_p0, 0.0).astype(kind),
        log_prior=jnp.where(live, log_prior, 0.0).astype(kind),
        count=jnp.asarray(count, jnp.int32),
        row_weights=jnp.zeros(num_rows, kind),
        scale=jnp.ones((), kind),
        start_weight=jnp.ones((), kind),
        reference=theta[best],
        log_evidence=jnp.zeros((), kind),
        visited=jnp.zeros((), jnp.int32),
        t=jnp.zeros((), jnp.int32),
        exact=jnp.ones((), bool),
    )


def relocate(
    state: State, theta: Array, log_q: Array, log_p0: Array, log_prior: Array, count: Array,
    exact: bool = False,
) -> State:  # fmt: skip
    """New particles, `count` of them in use, for the same density; log_q is normalised by them.

    `exact` says that log_q was evaluated, not taken from a fit.
    """
    live = jnp.arange(len(theta)) < count
    log_q = jnp.where(live, log_q, -jnp.inf)
    log_p0 = jnp.where(live, log_p0, 0.0)
    log_z = logsumexp(log_q - log_p0) - jnp.log(count.astype(log_q.dtype))
    return state._replace(
        theta=theta,
        log_q=log_q - log_z,
        log_p0=log_p0,
        log_prior=jnp.where(live, log_prior, 0.0),
        count=count,
        reference=theta[jnp.argmax(log_q)],
        exact=jnp.asarray(exact),
    )


def guarded(log_w: Array, direction: Array, g: Array, floor: Array) -> Array:
    """The largest step up to g that leaves an effective sample size of at least `floor`."""

    def accept(h: Array) -> Array:
        return ess(log_w + jnp.where(h > 0, h * direction, 0.0)) >= floor

    return jax.lax.cond(accept(g), lambda: g, lambda: bisect(accept, g))


def advance(state: State, sums: Sums, weight: Array, g: Array, floor: Array) -> tuple[State, Info]:
    """One mirror step, given the sums of log-likelihoods at the particles.

        log q <- (1 - g) log q + g [ log p + (N/B) sum_b log p(x_b | .) ] - log Z

    Everything except the row weights, which are the caller's to update.
    """
    log_w = log_weights(state)
    live = jnp.isfinite(log_w)
    target = jnp.where(live, state.log_prior + weight * sums.value, -jnp.inf)
    direction = jnp.where(live, target - jnp.where(live, state.log_q, 0.0), -jnp.inf)
    direction = direction - jnp.max(jnp.where(live, direction, -jnp.inf))
    h = guarded(log_w, direction, g, jnp.minimum(floor, 0.5 * ess(log_w)))
    kept = jnp.where(h < 1, (1 - h) * jnp.where(live, state.log_q, 0.0), 0.0)
    log_q = jnp.where(live, kept + h * target, -jnp.inf)
    count = state.count.astype(log_q.dtype)
    log_z = logsumexp(log_q - state.log_p0) - jnp.log(count)
    reference, rest = h * weight * sums.reference_sum, h * weight * sums.reference_rest
    new = state._replace(
        log_q=log_q - log_z,
        start_weight=(1 - h) * state.start_weight,
        log_evidence=(1 - h) * state.log_evidence + log_z + (reference + rest),
        t=state.t + 1,
        exact=state.exact | (h >= 1),
    )
    fine = (sums.bad == 0) & jnp.isfinite(log_z)
    new = jax.tree.map(lambda a, b: a if a is b else jnp.where(fine, a, b), new, state)
    info = Info(
        step_size=jnp.where(fine, h, 0.0),
        planned=g,
        ess=ess(log_weights(new)),
        log_normaliser=log_z,
        reference=reference,
        reference_rest=rest,
        batch_size=jnp.zeros((), jnp.int32),
        bad=jnp.where(fine, 0, jnp.maximum(sums.bad, 1)),
    )
    return new, info


def decay(state: State, h: Array) -> State:
    """c <- (1 - h) c for all rows at once, by the common scale."""
    scale = (1 - h) * state.scale
    small = scale < 1e-12
    weights = jax.lax.cond(small, lambda w: w * scale, lambda w: w, state.row_weights)
    return state._replace(row_weights=weights, scale=jnp.where(small, 1.0, scale))


def step_window(
    flat: Flat,
    blocks: Blocks,
    state: State,
    rows: PyTree,
    order: Array,
    start: Array,
    size: Array,
    g: Array,
    floor: Array,
) -> tuple[State, Info]:
    """One step on rows `order[start : start + size]` of data held on the device."""
    num_data = len(state.row_weights)
    weight = num_data / size.astype(state.log_q.dtype)
    one = jnp.ones((), state.log_q.dtype)
    fetch, num = window(rows, order, start, size, one, blocks.rows)
    sums = sum_rows(flat, state.theta, state.count, state.reference, fetch, num, blocks.particles)
    state, info = advance(state, sums, weight, g, floor)
    state = decay(state, info.step_size)
    added = info.step_size * weight / state.scale

    def add(k: Array, weights: Array) -> Array:
        offset = k * blocks.rows + jnp.arange(blocks.rows)
        index = jnp.take(order, start + offset, mode="clip")
        return weights.at[index].add(jnp.where(offset < size, added, 0.0))

    weights = jax.lax.fori_loop(0, num, add, state.row_weights)
    visited = state.visited + jnp.where(info.bad == 0, size, 0)
    return state._replace(row_weights=weights, visited=visited), info._replace(batch_size=size)


@partial(jax.jit, static_argnames=("flat", "blocks", "num_data"))
def step_batch(
    flat: Flat, blocks: Blocks, state: State, batch: Batch, num_data: int, g: Array, floor: Array
) -> tuple[State, Info]:
    """One step on rows that are given, as in a loop of one's own."""
    size = jnp.sum(batch.mask, dtype=jnp.int32)
    kind = state.log_q.dtype
    weight = num_data / jnp.maximum(size, 1).astype(kind)

    length = len(batch.mask)
    block = min(blocks.rows, length)

    def fetch(k: Array) -> tuple[PyTree, Array]:
        offset = k * block + jnp.arange(block)
        chosen = jnp.take(batch.mask, offset, mode="clip") & (offset < length)
        return take(batch.rows, offset), chosen.astype(kind)

    num = jnp.asarray(-(-length // block), jnp.int32)
    sums = sum_rows(flat, state.theta, state.count, state.reference, fetch, num, blocks.particles)
    state, info = advance(state, sums, weight, g, floor)
    state = decay(state, info.step_size)
    added = jnp.where(batch.mask, info.step_size * weight / state.scale, 0.0)
    weights = state.row_weights.at[batch.index].add(added.astype(kind), mode="drop")
    visited = state.visited + jnp.where(info.bad == 0, size, 0)
    return state._replace(row_weights=weights, visited=visited), info._replace(batch_size=size)


class Steps(NamedTuple):
    """Steps to take without leaving the device: windows into the order of rows, and sizes."""

    start: Array  # (T,)
    size: Array  # (T,)
    step_size: Array  # (T,)
    count: Array  # (T,) particles for the step, where they are drawn anew at every one


Draw = Callable[[Array, State, Array], State]


@partial(jax.jit, static_argnames=("flat", "blocks", "draw"))
def stretch(
    flat: Flat,
    blocks: Blocks,
    state: State,
    rows: PyTree,
    order: Array,
    steps: Steps,
    first: Array,
    last: Array,
    floor: Array,
    level: Array,
    key: Array,
    draw: Draw | None = None,
) -> tuple[State, Info, Array]:
    """Steps `first` to `last` in one compiled loop, until particles have to move.

    Stops after the step that leaves an effective sample size under `level`, or that the guard cut
    short, or that met a NaN.  With `draw` (strategy 2) particles are drawn anew before every step
    but the very first.  Returns the state, one record a step, and the number of the next step.
    """
    kind = state.log_q.dtype
    length = len(steps.start)
    empty = Info(
        *(jnp.zeros(length, kind) for _ in range(6)),
        *(jnp.zeros(length, jnp.int32) for _ in range(2)),
    )

    def going(carry: tuple[State, Info, Array, Array]) -> Array:
        _, _, t, stop = carry
        return (t < last) & ~stop

    def body(carry: tuple[State, Info, Array, Array]) -> tuple[State, Info, Array, Array]:
        state, infos, t, _ = carry
        if draw is not None:
            fresh = partial(draw, jax.random.fold_in(key, t))
            state = jax.lax.cond(state.t > 0, fresh, lambda s, count: s, state, steps.count[t])
        g = steps.step_size[t].astype(kind)
        state, info = step_window(
            flat, blocks, state, rows, order, steps.start[t], steps.size[t], g, floor
        )
        infos = jax.tree.map(lambda a, x: a.at[t].set(x.astype(a.dtype)), infos, info)
        poor = (info.ess < level) | (info.step_size < g * (1 - 1e-6)) | (info.bad > 0)
        return state, infos, t + 1, poor

    state, infos, t, _ = jax.lax.while_loop(going, body, (state, empty, first, jnp.zeros((), bool)))
    return state, infos, t
