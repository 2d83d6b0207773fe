"""The pieces under `fit`, in loops of one's own: init, step, move, posterior."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets
from recursion import Dense, apart, effective

import pmd
from pmd.exact import iterate, log_density
from pmd.mirror import Batch, log_weights

N, M = 400, 300
TARGET = targets.linear()


@cache
def algorithm(**given: Any) -> Any:
    arguments: dict[str, Any] = {"num_particles": M} | given
    return pmd.mirror_descent(TARGET.problem, num_data=N, **arguments)


def batch(index: np.ndarray, size: int | None = None) -> Batch:
    """Rows by number, padded to `size`."""
    size = len(index) if size is None else size
    chosen = np.zeros(size, np.int32)
    chosen[: len(index)] = index
    x, y = TARGET.data
    mask = np.arange(size) < len(index)
    return Batch((jnp.asarray(x[chosen]), jnp.asarray(y[chosen])), jnp.asarray(chosen),
                 jnp.asarray(mask))  # fmt: skip


EVERYTHING = np.arange(N)


def test_init_draws_from_the_prior() -> None:
    state = algorithm().init(jax.random.key(0))
    assert int(state.count) == M
    assert len(state.theta) == algorithm().capacity >= M
    assert state.theta.shape[1] == 3
    log_w = np.asarray(log_weights(state))
    np.testing.assert_array_equal(log_w[:M], 0.0)
    assert np.isneginf(log_w[M:]).all()
    assert not np.asarray(state.row_weights).any()
    again = algorithm().init(jax.random.key(0))
    np.testing.assert_array_equal(again.theta, state.theta)


def test_a_step_is_the_recursion_and_its_guard_the_densitys() -> None:
    made = algorithm(density=pmd.densities.gaussian())
    state = made.init(jax.random.key(1))
    dense = Dense(made.flat, state, jax.tree.map(jnp.asarray, TARGET.data))
    index = np.arange(20)
    # so small a step that the guard lets it pass
    small, info = made.step(state, batch(index), 1e-4)
    dense.step(index, 1e-4)
    assert float(info.step_size) == np.float32(1e-4)
    assert apart(small.log_q[:M], dense.log_q) < 1e-3
    # and a step that leaves .3 M effective particles
    guarded, info = made.step(state, batch(index), 1.0)
    assert float(info.step_size) < 1
    assert effective(np.asarray(log_weights(guarded), float)[:M]) == pytest.approx(
        0.3 * M, rel=0.01
    )
    assert int(guarded.visited) == 20
    # no guard for the paper's strategies
    for policy in (
        pmd.never(),
        pmd.every_step(),
        pmd.switch(pmd.every_step(), pmd.never(), after=1),
    ):
        free = algorithm(rejuvenate=policy)
        _, info = free.step(free.init(jax.random.key(1)), batch(index), 0.9)
        assert float(info.step_size) == np.float32(0.9)


def test_the_schedule_gives_the_step_where_none_is_given() -> None:
    made = algorithm(rejuvenate=pmd.never())
    state = made.init(jax.random.key(0))
    for visited in (0, 20, 40):
        state, info = made.step(state, batch(np.arange(visited, visited + 20)))
        assert float(info.planned) == pytest.approx(2 * 20 / (visited + 2 * N), rel=1e-6)
    state, info = made.step(state, batch(np.arange(60, 65), size=20))  # padded: its own size
    assert float(info.planned) == pytest.approx(2 * 5 / (60 + 2 * N), rel=1e-6)


def test_steps_can_be_jitted_and_scanned() -> None:
    made = algorithm(rejuvenate=pmd.never())
    state = made.init(jax.random.key(0))
    parts = [batch(np.arange(20 * k, 20 * k + 20)) for k in range(5)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *parts)
    scanned, infos = jax.jit(lambda s, b: jax.lax.scan(made.step, s, b))(state, stacked)
    for part in parts:
        state, info = made.step(state, part)
    np.testing.assert_allclose(scanned.log_q[:M], state.log_q[:M], atol=0.05, rtol=1e-5)
    assert float(infos.ess[-1]) == pytest.approx(float(info.ess), rel=1e-3)


def test_a_loop_of_ones_own_finds_the_posterior() -> None:
    """As in the documentation: batches, moves when degenerate, a last step on all rows."""
    made = algorithm()
    order = np.random.default_rng(0).permutation(N)
    key, state, last = jax.random.key(2), algorithm().init(jax.random.key(3)), None
    rows = jax.tree.map(jnp.asarray, TARGET.data)
    for start in range(0, N, 40):
        left = None
        for _ in range(4):  # what the guard refused is taken after a move, on the same rows
            state, info = made.step(state, batch(order[start : start + 40]), left)
            taken, asked = float(info.step_size), float(info.planned)
            if float(info.ess) < 0.5 * M or taken < asked:
                key, one = jax.random.split(key)
                state, last = made.move(one, state, rows, last)
            if taken >= asked * 0.999:
                break
            left = 1 - (1 - asked) / (1 - taken)
    key, one = jax.random.split(key)
    state, last = made.move(one, state, rows, last)
    fitted = made.posterior(state)
    assert not fitted.certificate.exact_last
    for _ in range(5):
        state, info = made.step(state, batch(EVERYTHING), 1.0)
        if float(info.step_size) >= 1:
            break
        key, one = jax.random.split(key)
        state, last = made.move(one, state, rows, last)
    posterior = made.posterior(state)
    assert posterior.certificate.exact_last
    n = float(posterior.ess)
    error = TARGET.truth.error(np.asarray(posterior.mean()["b"]))
    assert error < 4 / np.sqrt(n)
    off = abs(posterior.log_evidence - TARGET.truth.log_evidence)
    assert off < 4 * posterior.log_evidence_error + 0.01
    # A fit after the last exact step: the rows count once, but log q is what the fit says.
    moved, _ = made.move(one, state, rows, last)
    assert float(np.abs(np.asarray(moved.scale * moved.row_weights) - 1).max()) < 1e-5
    again = made.posterior(moved)
    assert again.certificate.exact_last == bool(moved.exact)


def test_a_move_keeps_the_row_weights_and_tells_what_it_did() -> None:
    made = algorithm(exact="always")
    state = made.init(jax.random.key(0))
    state, _ = made.step(state, batch(np.arange(20)), 0.05)
    rows = jax.tree.map(jnp.asarray, TARGET.data)
    moved, info = made.move(jax.random.key(1), state, rows)
    np.testing.assert_array_equal(moved.row_weights, state.row_weights)
    assert float(moved.log_evidence) == float(state.log_evidence)
    assert info.action in ("reweigh", "walk")
    assert info.count == int(moved.count)
    assert info.evaluations > 0
    assert bool(moved.exact)
    it = iterate(moved)
    exact, _, _ = log_density(made.flat, made.mover.blocks, it, rows, moved.theta, moved.count)
    live = slice(0, int(moved.count))
    assert apart(moved.log_q[live], exact[live]) < 1e-3 * 400
    assert abs(float(jax.nn.logsumexp(log_weights(moved))) - np.log(info.count)) < 1e-3


def test_particle_numbers_follow_the_fits_error() -> None:
    mover = algorithm().mover
    tolerance = mover.tolerance()
    assert mover.next_count(M, 2 * tolerance) == 2 * M
    assert mover.next_count(4 * M, np.inf) == 4 * M
    assert mover.next_count(4 * M, tolerance / 4) == 2 * M
    assert mover.next_count(M, tolerance / 4) == M
    assert mover.next_count(2 * M, tolerance / 2) == 2 * M
    assert algorithm(density=pmd.densities.kernel()).mover.next_count(M, np.nan) == M
