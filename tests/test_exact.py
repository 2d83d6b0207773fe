"""The exact iterate: its formula at any vector, walks under it, and modes found again."""

from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets
from recursion import Dense, Loop, apart
from scipy import stats

import pmd
from pmd.exact import iterate, log_density, posterior_iterate, prior_part, resample, walk, whitening
from pmd.likelihood import Blocks
from pmd.mirror import log_weights
from pmd.moves import Mover, place

N = 40


@cache
def regression(start: Any = None) -> pmd.Problem:
    target = targets.linear(rows=N, dimension=2).problem
    return pmd.Problem(target.log_prior, target.log_likelihood, target.sample_prior, start=start)


def rows() -> Any:
    return targets.linear(rows=N, dimension=2).data


WIDE = (
    lambda key: {"b": 3.0 * jax.random.normal(key, (2,)) - 0.5},
    lambda t: targets.log_normal(t["b"] + 0.5, 3.0).sum(),
)


@pytest.mark.parametrize("start", [None, WIDE], ids=["prior", "start"])
def test_the_iterate_is_known_where_no_particle_is(start: Any, precision: float) -> None:
    """log q_t = a log start + (1 - a) log p + sum c_n log p(x_n | .), at vectors of no account."""
    loop = Loop(regression(start).flat(), rows(), 64)
    order = np.random.default_rng(0).permutation(N)
    loop.run(order, [3, 5, 9], [0.1, 0.3, 0.2])
    it = iterate(loop.state)
    assert int(it.seen) == 17
    assert set(np.asarray(it.index)[:17]) == set(order[:17])

    at = jnp.asarray(np.random.default_rng(1).uniform(-2, 2, (50, 2)), loop.state.theta.dtype)
    value, log_prior, sums = log_density(
        loop.flat, loop.blocks, it, loop.rows, at, jnp.asarray(50, jnp.int32)
    )
    dense = Dense(loop.flat, loop.state._replace(theta=at, count=jnp.asarray(50)), loop.rows)
    for k, (size, g) in enumerate(zip([3, 5, 9], [0.1, 0.3, 0.2], strict=True)):
        dense.step(order[[0, 3, 8][k] :][:size], g)
    exact = dense.iterate()
    tolerance = 17 * 20 * np.abs(exact).max() * precision
    reference = float(sums.reference_sum) + float(sums.reference_rest)
    np.testing.assert_allclose(np.asarray(value, float) + reference, exact, atol=tolerance)
    np.testing.assert_allclose(log_prior, dense.log_prior, rtol=1e-5)
    prior, _ = prior_part(loop.flat, it, at)
    expected = dense.a * dense.log_start + (1 - dense.a) * dense.log_prior
    np.testing.assert_allclose(prior, expected, rtol=1e-5)


def test_the_posterior_weighs_every_row_once() -> None:
    loop = Loop(regression().flat(), rows(), 64)
    it = posterior_iterate(loop.state)
    value, _, _ = log_density(
        loop.flat, loop.blocks, it, loop.rows, loop.state.theta, jnp.asarray(64, jnp.int32)
    )
    dense = Dense(loop.flat, loop.state, loop.rows)
    posterior = dense.log_prior + dense.log_likelihood.sum(axis=0)
    assert apart(value[:64], posterior) < 1e-3


def test_nothing_is_left_of_the_start_after_a_step_with_all_weight() -> None:
    loop = Loop(regression(WIDE).flat(), rows(), 64)
    loop.run(np.arange(N), [N], [1.0])
    it = iterate(loop.state)
    prior, log_prior = prior_part(loop.flat, it, loop.state.theta)
    np.testing.assert_array_equal(prior, log_prior)


def test_resampling_keeps_the_counts_to_one() -> None:
    """Systematic: every ancestor n w_i times, rounded up or down."""
    log_w = jnp.asarray(np.random.default_rng(0).normal(0, 2, 50))
    ancestors = np.asarray(resample(jax.random.key(0), log_w, 400))
    expected = 400 * np.asarray(jax.nn.softmax(log_w))
    counts = np.bincount(ancestors, minlength=50)
    # float32 cumulative weights move a boundary by 1e-6, which may tip one draw
    assert (np.abs(counts - expected) <= 1 + 1e-3).all()
    assert (np.diff(ancestors) < 0).any()  # in random order


def test_resampling_never_takes_what_has_no_weight() -> None:
    log_w = jnp.where(jnp.arange(64) % 3 == 1, 0.0, -jnp.inf)
    ancestors = np.asarray(resample(jax.random.key(1), log_w, 1000))
    assert (ancestors % 3 == 1).all()


def test_whitening_whitens(precision: float) -> None:
    rng = np.random.default_rng(0)
    theta = jnp.asarray(rng.standard_normal((500, 3)) @ rng.standard_normal((3, 3)) * [1, 50, 1e-3])
    white = np.asarray(theta @ whitening(theta), float)
    np.testing.assert_allclose(np.cov(white.T, bias=True), np.eye(3), atol=2e-3)


def test_whitening_of_particles_that_are_all_equal_is_finite() -> None:
    assert np.isfinite(np.asarray(whitening(jnp.ones((50, 3))))).all()


# ------------------------------------------------------------------ walks

ROUNDS = 8  # walks, one after the other, from the same state: independent figures


def walked(loop: Loop, count: int, seed: int, **options: Any) -> Any:
    it = iterate(loop.state)
    end, _ = walk(
        loop.flat, loop.blocks, jax.random.key(seed), loop.state, it, loop.rows, count, **options
    )
    return end


def test_a_walk_leaves_a_gaussian_alone() -> None:
    """From draws of the density itself: means and covariance stay those of independent draws.

    Every particle has the density as its own at all times, so a mean over the walk's particles is
    one over `count` draws (partners correlate them a little: twice the error is allowed for).
    """
    target = targets.linear(rows=N, dimension=2)
    loop = Loop(regression().flat(), rows(), 256, capacity=1024, blocks=Blocks(256, 64))
    loop.run(np.arange(N), [N], [1.0])
    count, chol = 1000, np.linalg.cholesky(target.truth.cov)
    means, covariances, moved = [], [], []
    for seed in range(ROUNDS):
        z = np.random.default_rng(seed).standard_normal((1024, 2))
        theta = (target.truth.mean + z @ chol.T).astype(np.float32)
        log_q = np.zeros(1024)
        loop.state = place(loop.flat, loop.state, theta, log_q, log_q)
        end = walked(loop, count, seed)
        white = np.linalg.solve(chol, (np.asarray(end.theta, float) - target.truth.mean).T).T
        means.append(white.mean(axis=0))
        covariances.append(np.cov(white.T))
        moved.append(float(end.moved.mean()))
    assert min(moved) > 0.9
    assert int(end.bad) == 0
    n = ROUNDS * count
    assert np.abs(np.mean(means, axis=0)).max() < 4 * 2 / np.sqrt(n)
    assert np.abs(np.mean(covariances, axis=0) - np.eye(2)).max() < 4 * 2 * np.sqrt(2 / n)
    # what it says of log q is the density where it ended
    truth: Any = stats.multivariate_normal(*cast(Any, target.truth[:2]))
    assert apart(end.log_q, truth.logpdf(np.asarray(end.theta, float))) < 1e-3


def test_a_walk_ends_in_the_density_wherever_it_began() -> None:
    """From a cloud half as wide and off by one sd: 30 sweeps forget it."""
    target = targets.linear(rows=N, dimension=2)
    loop = Loop(regression().flat(), rows(), 256, capacity=1024, blocks=Blocks(256, 64))
    loop.run(np.arange(N), [N], [1.0])
    chol = np.linalg.cholesky(target.truth.cov)
    z = np.random.default_rng(0).standard_normal((1024, 2))
    theta = (target.truth.mean + (0.5 * z + 1.0) @ chol.T).astype(np.float32)
    loop.state = place(loop.flat, loop.state, theta, np.zeros(1024), np.zeros(1024))
    for seed in range(3):
        end = walked(loop, 1000, seed)
        log_q = np.asarray(end.log_q)
        loop.state = place(loop.flat, loop.state, np.asarray(end.theta), log_q, log_q)
    white = np.linalg.solve(chol, (np.asarray(end.theta, float) - target.truth.mean).T).T
    # 1000 draws, correlated: twice their error
    assert np.abs(white.mean(axis=0)).max() < 4 * 2 / np.sqrt(1000)
    assert np.abs(np.cov(white.T) - np.eye(2)).max() < 4 * 2 * np.sqrt(2 / 1000)


MODES, SHARES, SPREAD = np.array([-4.0, 3.0]), np.array([0.3, 0.7]), np.array([0.5, 0.8])


@cache
def two_modes() -> pmd.Problem:
    """A prior with two modes and rows that say nothing: the iterate is known at all times."""

    def log_prior(t: Any) -> Any:
        parts = jnp.log(SHARES) + targets.log_normal(t - jnp.asarray(MODES), jnp.asarray(SPREAD))
        return jax.nn.logsumexp(parts)

    def sample_prior(key: Any) -> Any:
        one, two = jax.random.split(key)
        k = (jax.random.uniform(one) > SHARES[0]).astype(int)
        return jnp.asarray(MODES)[k] + jnp.asarray(SPREAD)[k] * jax.random.normal(two)

    return pmd.Problem(log_prior, lambda t, row: 0.0 * row * t, sample_prior)


def test_a_walk_keeps_the_masses_of_modes() -> None:
    """Particles go from mode to mode, and as many one way as the other."""
    loop = Loop(two_modes().flat(), np.ones(8, np.float32), 1024, capacity=1024,
                blocks=Blocks(256, 64))  # fmt: skip
    loop.run(np.arange(8), [8], [0.5])
    begin = loop.state
    masses, crossed = [], []
    for seed in range(ROUNDS):
        theta = np.asarray(loop.flat.sample(jax.random.key(seed + 100), jnp.arange(1024)))
        log_q = np.asarray(loop.flat.log_prior(jnp.asarray(theta)))
        loop.state = place(loop.flat, begin, theta, log_q, log_q)
        end = walked(loop, 1000, seed)
        masses.append(float((end.theta < 0).mean()))
        crossed.append(float(end.moved.mean()))
    # Independent draws at the start and exact moves: binomial error, doubled for partners.
    error = np.sqrt(0.3 * 0.7 / (1000 * ROUNDS))
    assert abs(np.mean(masses) - 0.3) < 4 * 2 * error
    assert min(crossed) > 0.9


def test_a_mode_that_was_lost_is_found_again_by_weighing_wide_draws() -> None:
    """Particles in one mode of two; a wide density is drawn from; exact weights bring it back."""
    flat = two_modes().flat()
    loop = Loop(flat, np.ones(8, np.float32), 1024, capacity=4096, blocks=Blocks(256, 64))
    loop.run(np.arange(8), [8], [0.5])
    one_mode = np.asarray(flat.sample(jax.random.key(0), jnp.arange(4000)))
    one_mode = one_mode[one_mode[:, 0] > 0][:1000]
    log_q = np.asarray(flat.log_prior(jnp.asarray(one_mode)))
    loop.state = place(flat, loop.state, one_mode, log_q, log_q)
    assert float((loop.state.theta[:1000] < 0).mean()) == 0

    mover = Mover(flat, loop.blocks, None, "always", 1000)
    wide = 6.0 * np.random.default_rng(0).standard_normal((4000, 1))
    log_f = stats.norm.logpdf(wide[:, 0], 0, 6.0)
    # What a fit that knows one mode would say of its draws: no mass at the other.
    meant = stats.norm.logpdf(wide[:, 0], 3.0, 0.8)
    loop.state = place(flat, loop.state, wide, meant, log_f)
    state, action, _, spent, culprit = mover.check(
        jax.random.key(1), loop.state, iterate(loop.state), loop.rows, 0.1, 0.0
    )
    assert action == "reweigh"
    assert culprit is None
    assert spent == 4000  # all rows were seen: one evaluation a particle
    w = np.asarray(jax.nn.softmax(log_weights(state)))
    low = np.asarray(state.theta)[:, 0] < 0
    error = np.sqrt((w**2 * (low - 0.3) ** 2).sum())
    assert abs(w @ low - 0.3) < 4 * error
    assert error < 0.02


def test_an_audit_finds_what_is_wrong_and_keeps_what_is_right() -> None:
    flat = two_modes().flat()
    loop = Loop(flat, np.ones(8, np.float32), 1024, capacity=1024, blocks=Blocks(256, 64))
    loop.run(np.arange(8), [8], [0.5])
    mover = Mover(flat, loop.blocks, None, "auto", 1000)
    theta = np.asarray(flat.sample(jax.random.key(0), jnp.arange(1000)))
    log_f = np.asarray(flat.log_prior(jnp.asarray(theta)))
    for wrong, wanted in [(0.0, "fit"), (0.5, "reweigh")]:
        # log q off by half a nat in one of the modes, unknown constant apart
        meant = 40.0 + log_f + wrong * (theta[:, 0] > 0)
        state = place(flat, loop.state, theta, meant, log_f)
        state, action, audit, _, _ = mover.check(
            jax.random.key(1), state, iterate(loop.state), loop.rows, 0.1, 0.0
        )
        assert action == wanted
        assert audit == pytest.approx(wrong, abs=1e-3)
        # either way the weights are exact now: the draws were the density's own
        assert np.ptp(np.asarray(log_weights(state))[:1000]) < 2e-3


@cache
def half_line() -> pmd.Problem:
    """Impossible below zero."""
    return pmd.Problem(
        lambda t: targets.log_normal(t, 2.0),
        lambda t, row: jnp.where(t > 0, -row * t, -jnp.inf),
        lambda key: 2.0 * jax.random.normal(key),
    )


def test_a_walk_from_particles_that_turn_out_impossible() -> None:
    """A fit may have drawn where log q is -inf: such particles walk out, or weigh nothing."""
    flat = half_line().flat()
    loop = Loop(flat, np.ones(8, np.float32), 128, capacity=256)
    loop.run(np.arange(8), [8], [0.5])
    theta = 1.5 * np.random.default_rng(0).standard_normal((200, 1)).astype(np.float32)
    loop.state = place(flat, loop.state, theta, np.zeros(200), np.zeros(200))
    mover = Mover(flat, loop.blocks, None, "always", 100)
    state, info = mover.walk(jax.random.key(0), loop.state, iterate(loop.state), loop.rows, 200)
    assert info.action == "walk"
    assert info.culprit is None
    log_w = np.asarray(log_weights(state))[:200]
    assert not np.isnan(log_w).any()
    alive = np.isfinite(log_w)
    assert alive.mean() > 0.9
    assert (np.asarray(state.theta)[:200, 0][alive] > 0).all()
    assert np.ptp(log_w[alive]) < 1e-4  # equal weights


def test_reweighing_draws_of_which_some_are_impossible() -> None:
    flat = half_line().flat()
    loop = Loop(flat, np.ones(8, np.float32), 128, capacity=256)
    loop.run(np.arange(8), [8], [0.5])
    theta = np.random.default_rng(0).standard_normal((200, 1)).astype(np.float32)
    log_f = stats.norm.logpdf(theta[:, 0])
    state = place(flat, loop.state, theta, log_f, log_f)
    mover = Mover(flat, loop.blocks, None, "always", 200)
    state, action, _, _, culprit = mover.check(
        jax.random.key(1), state, iterate(loop.state), loop.rows, 0.1, 0.0
    )
    log_w = np.asarray(log_weights(state))[:200]
    assert action == "reweigh"
    assert culprit is None
    assert (np.isfinite(log_w) == (theta[:, 0] > 0)).all()
