"""The recursion: against dense NumPy, its guard, masks, precision, and one compilation."""

from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets
from recursion import Dense, Loop, apart, effective

import pmd
from pmd.exact import iterate, log_density
from pmd.likelihood import Blocks
from pmd.mirror import Batch, decay, log_weights, relocate, step_batch, stretch
from pmd.weights import ess

N = 60


@cache  # one problem, one program
def skewed(start: Any = None) -> pmd.Problem:
    """Two parameters, rows (x, k): a count with rate exp(a + b x).  No symmetry anywhere."""
    return pmd.Problem(
        log_prior=lambda t: targets.log_normal(t, 0.7).sum(),
        log_likelihood=lambda t, row: row[1] * (t[0] + row[0] * t[1]) - jnp.exp(
            t[0] + row[0] * t[1]
        ),
        sample_prior=lambda key: 0.7 * jax.random.normal(key, (2,)),
        start=start,
    )  # fmt: skip


SHIFTED = (
    lambda key: 0.3 + 0.9 * jax.random.normal(key, (2,)),
    lambda t: targets.log_normal(t - 0.3, 0.9).sum(),
)


def skewed_rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1.5, N)
    return x.astype(np.float32), rng.poisson(np.exp(0.4 + 0.5 * x)).astype(np.float32)


def compiled() -> int:
    """How many programs the loop was compiled to."""
    return cast(Any, stretch)._cache_size()


SIZES = [5, 7, 10, 13, 20, 33, 60]
STEPS = [0.1, 0.2, 0.15, 0.3, 0.25, 0.5, 0.4]


def order_of(sizes: list[int], seed: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    passes = -(-sum(sizes) // N)
    return np.concatenate([rng.permutation(N) for _ in range(passes + 1)])


def walk_through(loop: Loop, order: np.ndarray, sizes: Any, g: Any) -> tuple[Dense, list[float]]:
    """The same steps by hand."""
    dense, normalisers, at = Dense(loop.flat, loop.state, loop.rows), [], 0
    for size, h in zip(sizes, g, strict=True):
        normalisers.append(dense.step(order[at : at + size], h))
        at += size
    return dense, normalisers


@pytest.mark.parametrize("start", [None, SHIFTED], ids=["prior", "start"])
@pytest.mark.parametrize("last", [[], [1.0]], ids=["", "g=1"])
def test_fixed_particles_are_iterated_fractional_bayes(
    start: Any, last: list[float], precision: float
) -> None:
    """`never`: log q, log Z, evidence, row weights and the share of the start, by hand."""
    loop = Loop(skewed(start=start).flat(), skewed_rows(), 80)
    sizes, g = SIZES + [N] * len(last), STEPS + last
    order = order_of(sizes)
    dense, normalisers = walk_through(loop, order, sizes, g)
    state, infos, done = loop.run(order, sizes, g)
    assert done == len(g)

    spread = np.abs(dense.log_q).max() + N * np.abs(dense.log_likelihood).max()
    tolerance = len(g) * spread * 4 * precision
    assert apart(state.log_q[:80], dense.log_q) < tolerance
    np.testing.assert_allclose(state.log_q[:80], dense.log_q, atol=2 * tolerance)
    assert np.isneginf(np.asarray(state.log_q)[80:]).all()
    np.testing.assert_allclose(state.log_evidence, dense.log_evidence, atol=2 * tolerance)
    got = (infos.log_normaliser + infos.reference + infos.reference_rest)[: len(g)]
    np.testing.assert_allclose(got, normalisers, atol=2 * tolerance)
    np.testing.assert_allclose(state.scale * state.row_weights, dense.c, atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(state.start_weight, dense.a, rtol=1e-5)
    assert int(state.t) == len(g)
    assert int(state.visited) == sum(sizes)


@pytest.mark.parametrize("start", [None, SHIFTED], ids=["prior", "start"])
def test_log_q_is_the_exact_iterate_up_to_a_constant(start: Any, precision: float) -> None:
    """After any steps, guarded ones and one with g = 1 among them."""
    loop = Loop(skewed(start=start).flat(), skewed_rows(), 96)
    for part, (g, floor) in enumerate([(0.1, 0.0), (0.6, 40.0), (1.0, 0.0), (0.3, 20.0)]):
        sizes = [7, 20, N][: 2 + part % 2]
        loop.run(order_of(sizes, part), sizes, [g] * len(sizes), floor=floor)
        it = iterate(loop.state)
        count = jnp.asarray(96, jnp.int32)
        exact, log_prior, _ = log_density(
            loop.flat, loop.blocks, it, loop.rows, loop.state.theta, count
        )
        # Sums of N terms as large as `size`; each part of the run adds a few roundings of these.
        size = np.abs(Dense(loop.flat, loop.state, loop.rows).log_likelihood).max() * N
        assert apart(loop.state.log_q[:96], exact[:96]) < (part + 1) * 12 * size * precision
        np.testing.assert_allclose(log_prior[:96], loop.state.log_prior[:96], atol=1e-5)


def test_row_weights_after_very_many_steps(precision: float) -> None:
    """The common scale falls below 1e-12 on the way and is folded in."""
    loop = Loop(skewed().flat(), skewed_rows(), 32)
    rng = np.random.default_rng(0)
    c = np.zeros(N)
    for _ in range(4):
        order, g = rng.permutation(N), rng.uniform(0.7, 0.99, 12)
        loop.run(order, [5] * 12, g)
        for k, h in enumerate(g):
            c *= 1 - h
            c[order[5 * k : 5 * k + 5]] += h * N / 5
    weights = np.asarray(loop.state.scale * loop.state.row_weights, float)
    # 48 products by (1 - h), where 1 - h has a relative error of precision / .01
    np.testing.assert_allclose(weights, c, rtol=48 * 100 * precision, atol=1e-30)
    assert float(loop.state.scale) >= 1e-12


def test_rows_drawn_twice_weigh_twice() -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 32)
    order = np.array([3, 3, 8, 3, 8, 1])
    dense = Dense(loop.flat, loop.state, loop.rows)
    dense.step(order, 0.2)
    state, _, _ = loop.run(order, [6], [0.2])
    np.testing.assert_allclose(state.scale * state.row_weights, dense.c, rtol=1e-6)
    assert apart(state.log_q[:32], dense.log_q) < 1e-3


def test_whole_passes_with_equal_weights_are_the_posterior() -> None:
    """g = 1/t over a pass weighs all rows alike: the last iterate is the posterior itself."""
    loop = Loop(skewed().flat(), skewed_rows(), 64)
    state, _, _ = loop.run(order_of([N]), [5] * 12, 1 / np.arange(1, 13))
    np.testing.assert_allclose(state.scale * state.row_weights, 1.0, rtol=1e-5)
    dense = Dense(loop.flat, loop.state, loop.rows)
    posterior = dense.log_prior + dense.log_likelihood.sum(axis=0)
    assert apart(state.log_q[:64], posterior) < 1e-3


def test_log_evidence_of_the_last_exact_step() -> None:
    """20,000 particles from the prior: the evidence to the Monte Carlo error that they tell."""
    target = targets.poisson_rate()
    loop = Loop(target.problem.flat(), target.data, 20000, blocks=Blocks(512, 16))
    state, infos, _ = loop.run(np.tile(np.arange(12), 2), [5, 12], [0.3, 1.0])
    error = np.sqrt(1 / float(infos.ess[1]) - 1 / 20000)
    evidence = infos.log_normaliser + infos.reference + infos.reference_rest
    assert abs(float(evidence[1]) - target.truth.log_evidence) < 4 * error
    assert abs(float(state.log_evidence) - float(evidence[1])) < 1e-4


# ------------------------------------------------------------------ the guard


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_the_guard_takes_the_largest_step_that_leaves_enough(share: float) -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 200)
    dense = Dense(loop.flat, loop.state, loop.rows)
    order, floor = order_of([10]), share * 200
    before = effective(dense.log_w)
    _, infos, _ = loop.run(order, [10], [0.9], floor=floor)
    h = float(infos.step_size[0])
    wanted = min(floor, 0.5 * before)

    def after(h: float) -> float:
        return effective(dense.log_w + h * (dense.target(order[:10]) - dense.log_q))

    assert 0 < h < 0.9
    assert float(infos.planned[0]) == np.float32(0.9)
    # the size of a rounding error of h times the slope of the effective number is far below .1 %
    assert after(h) >= wanted * (1 - 1e-3)
    assert after(h * 1.002) < wanted
    assert float(infos.ess[0]) == pytest.approx(after(h), rel=1e-3)


def test_the_guard_lets_pass_what_leaves_enough() -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 200)
    _, infos, _ = loop.run(order_of([10]), [10], [0.01], floor=100.0)
    assert float(infos.step_size[0]) == np.float32(0.01)


def test_the_guard_asks_for_no_more_than_half_of_what_there_is() -> None:
    """Few effective particles before a step must not forbid all steps."""
    loop = Loop(skewed().flat(), skewed_rows(), 200)
    loop.run(order_of([20]), [20], [0.5])
    before = float(ess(log_weights(loop.state)))
    assert before < 50
    _, infos, _ = loop.run(order_of([20], 9), [20], [0.5], floor=150.0)
    assert float(infos.step_size[0]) > 0
    assert float(infos.ess[0]) >= 0.5 * before * (1 - 1e-3)


# ------------------------------------------------------------------ when the loop stops


def test_the_loop_stops_where_particles_have_to_move() -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 200)
    level = 60.0
    _, infos, done = loop.run(order_of([5] * 12), [5] * 12, [0.02] * 12, level=level)
    sizes = np.asarray(infos.ess)
    assert 1 < done < 12
    assert sizes[done - 1] < level
    assert (sizes[: done - 1] >= level).all()
    assert (sizes[done:] == 0).all()
    _, _, end = loop.run(order_of([5] * 12), [5] * 12, [0.02] * 12, first=done)
    assert end == 12
    assert int(loop.state.t) == 12


def test_a_guarded_step_stops_the_loop() -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 200)
    _, infos, done = loop.run(order_of([10] * 3), [10] * 3, [0.9] * 3, floor=60.0)
    assert done == 1
    assert float(infos.step_size[0]) < 0.9


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_meets_a_nan_is_not_taken(value: float) -> None:
    flat = pmd.Problem(
        lambda t: targets.log_normal(t),
        lambda t, row: jnp.where(row > 0.5, value, -row * t),
        lambda key: jax.random.normal(key),
    ).flat()
    rows = np.zeros(N, np.float32)
    rows[[17, 40]] = 1.0
    loop = Loop(flat, rows, 32)
    loop.run(np.arange(15), [5] * 3, [0.1] * 3)
    good = loop.state
    _, infos, done = loop.run(np.arange(15, N), [5] * 3, [0.1] * 3)
    assert done == 1
    assert int(infos.bad[0]) > 0
    assert float(infos.step_size[0]) == 0.0
    jax.tree.map(np.testing.assert_array_equal, loop.state, good)


def test_particles_without_weight_stay_without() -> None:
    flat = pmd.Problem(
        lambda t: targets.log_normal(t),
        lambda t, row: jnp.where(t < row, -jnp.inf, -(t - row)),  # shifted exponential
        lambda key: jax.random.normal(key),
    ).flat()
    loop = Loop(flat, np.linspace(-1, 0.2, N).astype(np.float32), 64)
    state, infos, done = loop.run(order_of([10] * 5), [10] * 5, [0.2] * 5, floor=5.0)
    theta, log_q = np.asarray(state.theta)[:64, 0], np.asarray(state.log_q)[:64]
    assert int(infos.bad[:done].sum()) == 0
    seen = order_of([10] * 5)[: 10 * done]
    impossible = theta < np.linspace(-1, 0.2, N)[seen].max()
    assert impossible.any()
    assert (np.isneginf(log_q) == impossible).all()
    assert np.isfinite(float(state.log_evidence))


# ------------------------------------------------------------------ batches, masks, compilations


def batch_of(rows: Any, index: np.ndarray, size: int, junk: float = 0.0) -> Batch:
    """A batch padded to `size`, its padding full of junk."""
    mask = np.arange(size) < len(index)
    chosen = np.zeros(size, np.int32)
    chosen[: len(index)] = index

    def cut(leaf: Any) -> Any:
        part = np.asarray(leaf)[chosen].copy()
        part[~mask] = junk
        return jnp.asarray(part)

    return Batch(jax.tree.map(cut, rows), jnp.asarray(chosen), jnp.asarray(mask))


def test_given_batches_and_windows_are_one_step() -> None:
    """`step_batch`, eager and compiled, and the loop; padding may hold anything."""
    flat = skewed().flat()
    loop = Loop(flat, skewed_rows(), 50)
    begin, floor = loop.state, jnp.zeros((), loop.state.log_q.dtype)
    index = order_of([11])[:11]
    g = jnp.asarray(0.3, begin.log_q.dtype)
    loop.run(index, [11], [0.3])
    whole, with_junk = batch_of(loop.rows, index, 11), batch_of(loop.rows, index, 20, junk=np.nan)
    with jax.disable_jit():
        eager, info = step_batch(flat, loop.blocks, begin, whole, N, g, floor)
    jitted, jit_info = step_batch(flat, loop.blocks, begin, with_junk, N, g, floor)
    tolerance = 200 * 4 * 1.2e-7 * N
    for other in (eager, jitted):
        np.testing.assert_allclose(other.log_q[:50], loop.state.log_q[:50], atol=tolerance)
        np.testing.assert_allclose(
            other.scale * other.row_weights, loop.state.scale * loop.state.row_weights, rtol=1e-5
        )
        assert int(other.visited) == 11
    assert float(info.step_size) == float(jit_info.step_size)
    assert int(jit_info.batch_size) == 11
    assert int(jit_info.bad) == 0


def test_a_last_short_batch_is_scaled_by_its_own_size() -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 40)
    order = order_of([50, 10])
    dense, _ = walk_through(loop, order, [50, 10], [0.4, 0.3])
    state, _, _ = loop.run(order, [50, 10], [0.4, 0.3])
    assert apart(state.log_q[:40], dense.log_q) < 2e-3
    np.testing.assert_allclose(state.scale * state.row_weights, dense.c, rtol=1e-5)


def test_steps_can_be_scanned_and_vectorised() -> None:
    flat = skewed().flat()
    loop = Loop(flat, skewed_rows(), 32)
    floor = jnp.zeros(())
    parts = [batch_of(loop.rows, np.arange(10 * k, 10 * k + 10), 10) for k in range(6)]
    batches = jax.tree.map(lambda *a: jnp.stack(a), *parts)

    def step(state: Any, batch: Any) -> Any:
        return step_batch(flat, loop.blocks, state, batch, N, jnp.asarray(0.2), floor)

    scanned, infos = jax.jit(lambda s: jax.lax.scan(step, s, batches))(loop.state)
    state = loop.state
    for part in parts:
        state, _ = step(state, part)
    np.testing.assert_allclose(scanned.log_q, state.log_q, atol=1e-3)
    assert infos.ess.shape == (6,)


def test_one_compilation_for_all_batch_sizes_and_particle_numbers() -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 20, length=9)
    before = compiled()
    for count, sizes in [(20, [1]), (40, [3, 60]), (256, [60, 7, 2]), (5, [N])]:
        live = jnp.arange(256) < count
        loop.state = relocate(
            loop.state, loop.state.theta, jnp.where(live, 0.0, -jnp.inf), jnp.zeros(256),
            loop.state.log_prior, jnp.asarray(count, jnp.int32),
        )  # fmt: skip
        loop.run(order_of(sizes), sizes, [0.1] * len(sizes), floor=2.0, level=1.0)
    assert compiled() == before + 1


def test_relocation_normalises_by_the_new_particles() -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 20)
    rng = np.random.default_rng(0)
    theta, log_q, log_p0 = rng.standard_normal((256, 2)), rng.standard_normal(256), np.zeros(256)
    count = jnp.asarray(25, jnp.int32)
    points, q, p0 = (jnp.asarray(a, jnp.float32) for a in (theta, log_q + 500, log_p0))
    state = relocate(loop.state, points, q, p0, p0, count)
    assert int(state.count) == 25
    assert np.isneginf(np.asarray(state.log_q)[25:]).all()
    assert float(jax.nn.logsumexp(log_weights(state)) - np.log(25)) == pytest.approx(0, abs=1e-4)
    np.testing.assert_array_equal(state.reference, theta[np.argmax(log_q[:25])].astype(np.float32))
    assert float(state.log_evidence) == float(loop.state.log_evidence)


def test_decay_of_nothing_and_of_everything() -> None:
    loop = Loop(skewed().flat(), skewed_rows(), 20)
    state, _, _ = loop.run(order_of([10]), [10], [0.3])
    same = decay(state, jnp.zeros(()))
    np.testing.assert_array_equal(same.scale * same.row_weights, state.scale * state.row_weights)
    gone = decay(state, jnp.ones(()))
    assert float(gone.scale) == 1.0
    assert not np.asarray(gone.row_weights).any()
