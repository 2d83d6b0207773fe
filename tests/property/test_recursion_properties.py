"""What holds of a step whatever the particles, rows, sizes and weights are."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import targets
from hypothesis import given, settings
from hypothesis import strategies as st
from recursion import Dense, Loop, apart, effective

import pmd
from pmd.exact import resample
from pmd.mirror import Batch, State, log_weights, step_batch
from pmd.run import Refused
from pmd.weights import ess, temper

N, M, B = 24, 48, 12

fractions = st.floats(0.01, 1.0, allow_nan=False)
seeds = st.integers(0, 2**31 - 1)
sizes = st.lists(st.integers(1, N), min_size=1, max_size=5)


@cache
def view(shift: float = 0.0) -> Any:
    """Two parameters, a skewed likelihood, `shift` added to that of every row."""
    return pmd.Problem(
        lambda t: targets.log_normal(t).sum(),
        lambda t, row: row[1] * (t[0] + row[0] * t[1]) - jnp.exp(t[0] + row[0] * t[1]) + shift,
        lambda key: jax.random.normal(key, (2,)),
    ).flat()


def rows_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, N).astype(np.float32)
    return x, rng.poisson(1.0, N).astype(np.float32)


def loop_of(seed: int, shift: float = 0.0) -> Loop:
    return Loop(view(shift), rows_of(seed), M, seed=seed % 1000, capacity=64)


def run(loop: Loop, sizes: list[int], g: float, seed: int, floor: float = 0.0) -> State:
    order = np.random.default_rng(seed).integers(0, N, sum(sizes))
    return loop.run(order, sizes, [g] * len(sizes), floor=floor)[0]


@given(seeds, sizes, fractions, st.sampled_from([0.0, 5.0, 20.0]))
@settings(max_examples=25)
def test_invariants_after_any_steps(seed: int, sizes: list[int], g: float, floor: float) -> None:
    loop = loop_of(seed)
    order = np.random.default_rng(seed).integers(0, N, sum(sizes))
    dense = Dense(loop.flat, loop.state, loop.rows)
    first = 0
    while first < len(sizes):  # a guarded step ends the loop, which is taken up behind it
        state, infos, done = loop.run(order, sizes, [g] * len(sizes), floor=floor, first=first)
        for k in range(first, done):
            at = sum(sizes[:k])
            taken = float(infos.step_size[k])
            before = effective(dense.log_w)
            dense.step(order[at : at + sizes[k]], taken)
            assert 0 < taken <= np.float32(g)
            assert float(infos.ess[k]) >= min(floor, 0.5 * before) * 0.999 or not floor
        first = done
    log_w = np.asarray(log_weights(state), float)
    # normalised over the particles in use, the rest without weight
    assert abs(np.logaddexp.reduce(log_w[:M]) - np.log(M)) < 1e-4
    assert np.isneginf(log_w[M:]).all()
    # what is not of the start is of the rows: sum c_n = N (1 - a)
    total = float((state.scale * state.row_weights).sum())
    assert abs(total - N * (1 - float(state.start_weight))) < 1e-3
    # and log q is the exact iterate; numbers up to `spread`, a few roundings a step
    spread = N * np.abs(dense.log_likelihood).max()
    assert apart(state.log_q[:M], dense.iterate()) < 10 * (len(sizes) + 1) * spread * 1.2e-7


@given(seeds, sizes, fractions)
@settings(max_examples=15)
def test_a_constant_in_log_q_changes_nothing(seed: int, sizes: list[int], g: float) -> None:
    one, other = loop_of(seed), loop_of(seed)
    other.state = other.state._replace(log_q=other.state.log_q + 64.0)
    a, b = run(one, sizes, g, seed), run(other, sizes, g, seed)
    spread = np.ptp(np.asarray(a.log_q)[:M]) + 64
    np.testing.assert_allclose(a.log_q[:M], b.log_q[:M], atol=40 * spread * 1.2e-7)


@given(seeds, sizes, fractions)
@settings(max_examples=15)
def test_a_constant_in_the_likelihood_is_in_the_evidence_alone(
    seed: int, sizes: list[int], g: float
) -> None:
    one, other = loop_of(seed), loop_of(seed, shift=2.0)
    a, b = run(one, sizes, g, seed), run(other, sizes, g, seed)
    spread = np.ptp(np.asarray(a.log_q)[:M]) + 2 * N
    np.testing.assert_allclose(a.log_q[:M], b.log_q[:M], atol=40 * spread * 1.2e-7)
    added = 2.0 * N * (1 - float(a.start_weight))
    off = float(b.log_evidence) - float(a.log_evidence) - added
    assert abs(off) < 40 * (spread + abs(float(b.log_evidence))) * 1.2e-7


@given(seeds, sizes, fractions)
@settings(max_examples=15)
def test_the_order_of_the_particles_is_of_no_account(seed: int, sizes: list[int], g: float) -> None:
    one, other = loop_of(seed), loop_of(seed)
    turned = np.r_[np.random.default_rng(seed).permutation(M), np.arange(M, 64)]
    state = other.state
    other.state = state._replace(
        theta=state.theta[turned], log_q=state.log_q[turned], log_p0=state.log_p0[turned],
        log_prior=state.log_prior[turned],
    )  # fmt: skip
    a, b = run(one, sizes, g, seed, floor=10.0), run(other, sizes, g, seed, floor=10.0)
    spread = np.ptp(np.asarray(a.log_q)[:M])
    np.testing.assert_allclose(
        np.asarray(a.log_q)[turned][:M], b.log_q[:M], atol=1e-3 + 40 * spread * 1.2e-7, rtol=1e-3
    )


@given(seeds, st.integers(1, B), fractions)
@settings(max_examples=15)
def test_the_order_of_the_rows_and_the_padding_are_of_no_account(
    seed: int, size: int, g: float
) -> None:
    rng = np.random.default_rng(seed)
    loop = loop_of(seed)
    index = rng.permutation(N)[:size]

    def padded(index: np.ndarray, places: np.ndarray, junk: float) -> Batch:
        mask = np.zeros(B, bool)
        mask[places] = True
        full = np.zeros(B, np.int32)
        full[places] = index
        rows = [np.where(mask, np.asarray(a)[full], junk) for a in loop.rows]
        return Batch(
            tuple(jnp.asarray(r, jnp.float32) for r in rows), jnp.asarray(full), jnp.asarray(mask)
        )

    def step(batch: Batch) -> State:
        args = (loop.state, batch, N, jnp.asarray(g, jnp.float32), jnp.zeros(()))
        return step_batch(loop.flat, loop.blocks, *args)[0]

    a = step(padded(index, np.arange(size), 0.0))
    b = step(padded(rng.permutation(index), np.sort(rng.permutation(B)[:size]), np.nan))
    spread = np.ptp(np.asarray(a.log_q)[:M]) + 1
    np.testing.assert_allclose(a.log_q[:M], b.log_q[:M], atol=40 * spread * 1.2e-7)
    np.testing.assert_allclose(a.scale * a.row_weights, b.scale * b.row_weights, rtol=1e-6)


@given(st.floats(1e-4, 1.0), st.floats(1e-3, 0.999), st.integers(1, 1000))
def test_what_was_refused_makes_the_step_whole(asked: float, share: float, size: int) -> None:
    """(1 - taken) (1 - left) = 1 - asked: the batch ends with the weight that was planned."""
    taken = share * asked
    rest = Refused.of(None, size, asked, taken)
    if rest is None:
        assert 1 - (1 - asked) / (1 - taken) < 0.1 * asked
        return
    assert abs((1 - taken) * (1 - rest.left) - (1 - asked)) < 1e-9
    assert rest.size == size
    assert 0 < rest.left <= 1


# ------------------------------------------------------------------ weights

finite = st.floats(-300, 300, allow_nan=False, width=32)
log_weight_lists = st.lists(st.one_of(finite, st.just(-np.inf)), min_size=16, max_size=16).filter(
    lambda values: max(values) > -np.inf
)


@given(log_weight_lists, st.floats(-500, 500, width=32))
def test_effective_numbers(values: list[float], shift: float) -> None:
    log_w = jnp.asarray(values, jnp.float32)
    n = float(ess(log_w))
    assert 1 - 1e-5 <= n <= 16 + 1e-3
    assert n <= np.isfinite(values).sum() + 1e-3
    # adding a constant rounds values up to 800 by 5e-5
    assert abs(float(ess(log_w + jnp.float32(shift))) - n) < 1e-3 * n
    assert float(ess(log_w[::-1])) == np.float32(n) or abs(float(ess(log_w[::-1])) - n) < 1e-4 * n


@given(log_weight_lists, st.floats(1.0, 16.0))
def test_flattened_weights_reach_the_floor_where_it_can_be_reached(
    values: list[float], floor: float
) -> None:
    log_w = jnp.asarray(values, jnp.float32)
    w = np.asarray(temper(log_w, jnp.float32(floor)), float)
    assert abs(w.sum() - 1) < 1e-5
    assert (w[np.isneginf(values)] == 0).all()
    reachable = min(floor, float(np.isfinite(values).sum()))
    assert 1 / (w**2).sum() >= reachable * (1 - 1e-3)


@given(seeds, log_weight_lists)
@settings(max_examples=40)
def test_systematic_resampling_rounds_the_expected_counts(seed: int, values: list[float]) -> None:
    log_w = jnp.asarray(values, jnp.float32)
    ancestors = np.asarray(resample(jax.random.key(seed), log_w, 64))
    expected = 64 * np.asarray(jax.nn.softmax(log_w), float)
    counts = np.bincount(ancestors, minlength=16)
    assert counts.sum() == 64
    assert (np.abs(counts - expected) < 1 + 1e-3).all()
    assert (counts[np.isneginf(values)] == 0).all()
