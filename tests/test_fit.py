"""`pmd.fit` from end to end: closed forms, a grid, strategies, limits, and what goes wrong.

Most tests share one problem and one number of particles, so that little has to be compiled.
"""

import itertools
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets
from numpyro.distributions import constraints as on
from recursion import Dense, Loop, effective, log_total
from scipy import stats
from scipy.special import logsumexp

import pmd
from pmd.errors import NotFiniteError
from pmd.mirror import log_weights, stretch
from pmd.moves import Redraw
from pmd.plan import make_plan
from pmd.rows import Order

MEAN = targets.gaussian_mean()
FEW = 300


def fit(target: Any = MEAN, **given: Any) -> pmd.Posterior:
    given = {"num_particles": FEW, "passes": 3, "progress": False} | given
    return pmd.fit(target.problem, target.data, **given)


@cache
def usual() -> pmd.Posterior:
    """The default run that many tests look at."""
    return fit()


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree)])


def compiled() -> int:
    """How many programs the loop was compiled to."""
    return cast(Any, stretch)._cache_size()


def steps(posterior: pmd.Posterior) -> list[dict[str, Any]]:
    return [record for record in posterior.history if record["kind"] == "step"]


def moves(posterior: pmd.Posterior) -> list[dict[str, Any]]:
    return [record for record in posterior.history if record["kind"] == "move"]


# ------------------------------------------------------------------ closed forms


def check(posterior: pmd.Posterior, truth: targets.Truth) -> None:
    """Mean, sds and evidence to what the particles can know.

    The weights of the last step are exact, so that means err by at most 1 / sqrt(ESS) posterior
    sds, sds by 1 / sqrt(2 ESS) of themselves and the evidence by its own error; four times that,
    and never more than what the project promises.
    """
    n = float(posterior.ess)
    assert truth.error(flat(posterior.mean())) < min(4 / np.sqrt(n), 0.03)
    sds = flat(posterior.std()) / np.sqrt(np.diag(truth.cov))
    assert np.abs(sds - 1).max() < min(4 / np.sqrt(n), 0.04)  # skewed: more than 1 / sqrt(2 n)
    off = abs(posterior.log_evidence - truth.log_evidence)
    assert off < min(4 * posterior.log_evidence_error, 0.02) + 1e-3
    assert posterior.certificate.verdict == "trust"
    assert posterior.certificate.exact_last


@pytest.mark.parametrize(
    "make",
    [targets.gaussian_mean, targets.linear, targets.normal_inverse_gamma, targets.poisson_rate],
)
def test_closed_forms(make: Any) -> None:
    target = make()
    check(fit(target), target.truth)


def test_closed_form_in_float64() -> None:
    with jax.enable_x64(True):
        posterior = fit(targets.linear())
        check(posterior, targets.linear().truth)


def test_a_constrained_parameter_has_the_same_posterior_as_a_free_one() -> None:
    """The rate itself, positive, instead of its logarithm: same evidence, mean of a gamma."""
    free = targets.poisson_rate()
    total, rows = float(free.data.sum()), len(free.data)
    problem = pmd.Problem(
        log_prior=lambda r: jax.scipy.stats.gamma.logpdf(r, 1.5),
        log_likelihood=lambda r, k: jax.scipy.stats.poisson.logpmf(k, r),
        sample_prior=lambda key: jax.random.gamma(key, 1.5),
        constraints=on.positive,
    )
    posterior = pmd.fit(problem, free.data, num_particles=FEW, passes=3, progress=False)
    gamma: Any = stats.gamma(1.5 + total, scale=1 / (1 + rows))
    error = gamma.std() * 4 / np.sqrt(float(posterior.ess))
    assert abs(float(posterior.mean()) - gamma.mean()) < error
    assert abs(posterior.log_evidence - free.truth.log_evidence) < 0.02
    at = np.array([0.1, 0.2, 0.5])
    np.testing.assert_allclose(posterior.log_prob(at), gamma.logpdf(at), atol=0.1)


# ------------------------------------------------------------------ an asymmetric target on a grid


@cache
def two_modes() -> Any:
    return targets.mixture(side=161)


def mass(posterior: pmd.Posterior) -> float:
    return float(posterior.expect(lambda t: (t[1] < 0).astype(float)))


def test_two_unequal_modes_against_a_grid() -> None:
    problem, x, grid = two_modes()
    posterior = pmd.fit(problem, x, num_particles=1500, passes=3, progress=False)
    n = float(posterior.ess)
    assert abs(mass(posterior) - grid.first_mode) < min(4 / np.sqrt(n), 0.005)
    assert np.abs((flat(posterior.mean()) - grid.mean) / grid.sd).max() < 4 / np.sqrt(n)
    assert np.abs(flat(posterior.std()) / grid.sd - 1).max() < 4 / np.sqrt(n)
    assert abs(posterior.log_evidence - grid.log_evidence) < 0.01
    exact = np.log(np.maximum(grid.weights, 1e-300) / grid.cell)
    near = exact > exact.max() - 8
    fitted = np.asarray(posterior.log_prob(jnp.asarray(grid.points[near])), float)
    share = np.exp(exact[near]) * grid.cell
    # total variation, of what the fitted density says at the grid's points
    assert 0.5 * np.abs(np.exp(fitted) * grid.cell - share).sum() < 0.01


@pytest.mark.statistical
@pytest.mark.parametrize("seed", range(100))
def test_no_mode_is_lost_over_many_seeds(seed: int) -> None:
    problem, x, grid = two_modes()
    posterior = pmd.fit(problem, x, num_particles=1500, passes=3, seed=seed, progress=False)
    assert abs(mass(posterior) - grid.first_mode) < 0.02


# ------------------------------------------------------------------ strategy 1


def batches_of(plan: Any, seed: int) -> list[tuple[np.ndarray, float]]:
    """Rows and mixing fractions of the minibatch phase, by hand."""
    order = Order(plan.num_data, seed, plan.replace)
    passes = int(np.ceil(plan.passes)) + 1
    rows = np.concatenate([order.of_pass(k) for k in range(passes)])
    size, g = plan.steps(0, 0, 10**6)
    ends = np.cumsum(size)
    return [(rows[end - n : end], float(h)) for n, end, h in zip(size, ends, g, strict=True)]


@pytest.mark.parametrize("replace", [False, True], ids=["permutation", "with replacement"])
def test_never_is_iterated_fractional_bayes_on_draws_of_the_prior(replace: bool) -> None:
    posterior = fit(rejuvenate=pmd.never(), passes=2.5, seed=3, replace=replace)
    view = MEAN.problem.flat()
    loop = Loop(view, MEAN.data, FEW)
    theta = np.asarray(posterior.particles)[:, None]
    log_prior = view.log_prior(jnp.asarray(theta))
    state = loop.state._replace(
        theta=jnp.asarray(theta), count=jnp.asarray(FEW), log_q=log_prior, log_p0=log_prior,
    )  # fmt: skip
    dense = Dense(view, state, loop.rows)
    plan = make_plan(
        300, 1, num_particles=FEW, passes=2.5, batch_size=None, full_passes=None, step_size=None,
        density=None, rejuvenate=pmd.never(), exact=None, replace=replace, evaluations=None,
        seconds=None,
    )  # fmt: skip
    batches = batches_of(plan, seed=3)
    assert [len(rows) for rows, _ in batches] == [10] * 75
    for rows, g in batches:
        dense.step(rows, g)
    # 75 steps, each rounding numbers up to the spread of log q, most of it (1 - g) times forgotten
    log_w = np.asarray(posterior.log_weights, float)
    near = dense.log_w > dense.log_w.max() - 30
    expected = dense.log_w - log_total(dense.log_w)
    np.testing.assert_allclose(log_w[near], expected[near], atol=75 * 300 * 6e-8)
    evidence = 0.0
    for record in steps(posterior):
        evidence = (1 - record["step_size"]) * evidence + record["log_normaliser"]
    np.testing.assert_allclose(evidence, dense.log_evidence, atol=0.01)
    assert abs(posterior.log_evidence - MEAN.truth.log_evidence) < 4 * posterior.log_evidence_error
    # draws of the prior, N(0, 3^2)
    assert abs(theta.mean()) < 4 * 3 / np.sqrt(FEW)
    assert not moves(posterior)
    assert all(record["step_size"] == record["planned"] for record in steps(posterior))
    with pytest.raises(pmd.PmdError, match="kernel_estimate"):
        posterior.log_prob(0.0)


def slope_of_never(sizes: list[int], runs: int) -> tuple[float, float]:
    """Slope of the RMSE of the exact iterate's mean against particles, log-log, and its sd.

    With R runs a size the log of an RMSE has sd 1 / sqrt(2 R), and a slope over sizes at x = log m
    has that over sqrt(sum (x - mean x)^2).
    """
    target = targets.poisson_rate(rows=20)
    view = target.problem.flat()
    order, batches, g = np.arange(20), [5, 5, 10], [0.3, 0.4, 0.6]
    axis = jnp.linspace(-8.0, 3.0, 4001)  # the exact iterate on a fine grid of the real line
    grid = Loop(view, target.data, 4001)
    dense = Dense(view, grid.state._replace(theta=axis[:, None]), grid.rows)
    for k, h in enumerate(g):
        dense.step(order[[0, 5, 10][k] :][: batches[k]], h)
    exact = dense.iterate()
    truth = float(np.exp(exact - log_total(exact)) @ np.asarray(axis, float))
    loop = Loop(view, target.data, sizes[-1])
    errors = []
    for m in sizes:
        found = []
        for seed in range(runs):
            loop.state = start(view, loop, seed, m)
            state, _, _ = loop.run(order, batches, g)
            weights = np.asarray(jax.nn.softmax(log_weights(state)), float)
            found.append(weights @ np.asarray(state.theta, float)[:, 0])
        errors.append(np.sqrt(np.mean((np.array(found) - truth) ** 2)))
    x = np.log(sizes)
    sd = 1 / np.sqrt(2 * runs) / np.sqrt(((x - x.mean()) ** 2).sum())
    return float(np.polyfit(x, np.log(errors), 1)[0]), float(sd)


def test_error_of_never_falls_as_one_over_the_root_of_the_particles() -> None:
    slope, sd = slope_of_never([250, 1000, 4000, 16000], runs=64)
    assert 3.5 * sd < 0.1  # so that .1 tells
    assert abs(slope + 0.5) < 0.1


@pytest.mark.statistical
def test_error_of_never_falls_as_one_over_the_root_of_the_particles_closely() -> None:
    slope, sd = slope_of_never([1000, 4000, 16000, 64000], runs=512)
    assert abs(slope + 0.5) < 4 * sd


def start(view: Any, loop: Loop, seed: int, count: int) -> Any:
    """Fresh draws of the prior in a loop's arrays."""
    from pmd.mirror import initial

    number = jnp.asarray(count, jnp.int32)
    return initial(view, jax.random.key(seed), number, len(loop.state.theta), loop.num_data)


def test_never_with_many_particles_reaches_the_floor_of_the_grid() -> None:
    """Weighted integrals of 20,000 draws of the prior are those of exact mirror descent."""
    problem, x, grid = two_modes()
    seed, passes = 1, 3
    posterior = pmd.fit(
        problem, x, num_particles=20000, passes=passes, rejuvenate=pmd.never(), seed=seed,
        progress=False,
    )  # fmt: skip
    view = problem.flat()
    loop = Loop(view, x, len(grid.points))
    dense = Dense(
        view, loop.state._replace(theta=jnp.asarray(grid.points, jnp.float32),
                                  count=jnp.asarray(len(grid.points))), loop.rows,
    )  # fmt: skip
    plan = make_plan(
        400, 2, num_particles=20000, passes=passes, batch_size=None, full_passes=None,
        step_size=None, density=None, rejuvenate=pmd.never(), exact=None, replace=False,
        evaluations=None, seconds=None,
    )  # fmt: skip
    for rows, g in batches_of(plan, seed):
        dense.step(rows, g)
    exact = dense.iterate()
    w = np.exp(exact - log_total(exact))
    v = np.exp(np.asarray(posterior.log_weights, float))
    theta = np.asarray(posterior.particles, float)
    for f in (lambda t: t[:, 0], lambda t: t[:, 1], lambda t: (t[:, 1] < 0) * 1.0):
        truth, found = w @ f(grid.points), v @ f(theta)
        error = np.sqrt((v**2 * (f(theta) - found) ** 2).sum())
        assert abs(found - truth) < 4 * error + 0.01  # .01: of the grid


# ------------------------------------------------------------------ strategy 2 and the switch


def log_kde(theta: np.ndarray, centres: np.ndarray, log_w: np.ndarray, h: float) -> np.ndarray:
    """The paper's weighted kernel density estimate, with a Gaussian kernel of width h."""
    d = centres.shape[1]
    square = ((theta[:, None] - centres[None]) ** 2).sum(-1) / h**2
    log_kernel = -0.5 * square - d * np.log(h) - 0.5 * d * np.log(2 * np.pi)
    return np.asarray(logsumexp(log_w - log_total(log_w) + log_kernel, axis=1))


def test_every_step_is_the_papers_formula() -> None:
    """alpha_i ~ q(theta_i)^-g p(theta_i)^g p(x | theta_i)^(N g), theta_i drawn from q, twice."""
    target = targets.linear(rows=40, dimension=2)
    view = target.problem.flat()
    m = 60
    density = pmd.densities.kernel(pmd.densities.isotropic(c=2.0), independent=True)
    loop = Loop(view, target.data, m)
    order, draw = np.random.default_rng(0).permutation(40), Redraw(view, density)
    state, _, _ = loop.run(order[:4], [4], [0.1], draw=draw)
    for step, g in ((1, 0.05), (2, 0.04)):
        centres = np.asarray(state.theta, float)[:m]
        log_w = np.asarray(log_weights(state), float)[:m]
        rows = order[4 * step : 4 * step + 4]
        state, infos, _ = loop.run(rows, [4], [g], draw=draw, seed=step)
        theta = np.asarray(state.theta, float)[:m]
        assert not np.isin(theta[:, 0], centres[:, 0]).any()
        log_q = log_kde(theta, centres, log_w, 2.0 / np.sqrt(m))
        log_prior = np.asarray(view.log_prior(state.theta), float)[:m]
        values = view.log_likelihood(state.theta, jax.tree.map(lambda a, r=rows: a[r], loop.rows))
        log_p = np.asarray(values, float).mean(axis=0)[:m]  # the mean of the batch, N times
        alpha = -g * log_q + g * log_prior + 40 * g * log_p
        got = np.asarray(log_weights(state), float)[:m]
        np.testing.assert_allclose(got - log_total(got), alpha - log_total(alpha), atol=2e-3)
        assert float(infos.step_size[0]) == np.float32(g)
        np.testing.assert_allclose(float(infos.ess[0]), effective(alpha), rtol=1e-3)


def test_every_step_through_fit() -> None:
    """Draws anew at every step in one loop, without guard; the last is a kernel mixture."""
    problem, x, grid = two_modes()
    posterior = pmd.fit(
        problem, x, num_particles=FEW, passes=2, rejuvenate=pmd.every_step(),
        density=pmd.densities.kernel(pmd.densities.isotropic()), progress=False,
    )  # fmt: skip
    done = steps(posterior)
    assert [record["rows"] for record in done] == [10] * 80
    assert all(record["step_size"] == record["planned"] for record in done)
    assert posterior.certificate.exact == "never"
    # The paper's strategy does not converge at a practical m: it is in the right region.
    assert np.abs((flat(posterior.mean()) - grid.mean) / grid.sd).max() < 3
    total = np.exp(np.asarray(posterior.log_prob(jnp.asarray(grid.points)))).sum() * grid.cell
    assert abs(total - 1) < 0.05  # what the grid holds of a wide kernel mixture


def test_particle_numbers_follow_a_schedule_and_a_switch() -> None:
    problem, x, _ = two_modes()
    kernel = pmd.densities.kernel(pmd.densities.scott())
    growing = pmd.fit(
        problem, x, num_particles=pmd.schedules.linear(50, FEW), passes=2,
        rejuvenate=pmd.every_step(), density=kernel, progress=False,
    )  # fmt: skip
    counts = [record["particles"] for record in steps(growing)]
    assert counts[0] == 50
    assert (np.diff(counts) >= 0).all()
    assert counts[-1] == round(50 + 250 * 79 / 80)
    switched = pmd.fit(
        problem, x, passes=2, density=kernel, progress=False,
        rejuvenate=pmd.switch(pmd.every_step(), pmd.never(), after=0.5, num_particles=(60, FEW)),
    )  # fmt: skip
    counts = [record["particles"] for record in steps(switched)]
    assert counts == [60] * 20 + [FEW] * 60
    assert len(moves(switched)) == 1
    assert len(switched.particles) == FEW


def test_a_schedule_holds_where_particles_move_when_degenerate() -> None:
    problem, x, _ = two_modes()
    posterior = pmd.fit(
        problem, x, num_particles=pmd.schedules.linear(50, FEW), passes=2,
        density=pmd.densities.kernel(pmd.densities.scott()), progress=False,
    )  # fmt: skip
    counts = [record["particles"] for record in steps(posterior)]
    assert counts[0] == 50
    for before, record in itertools.pairwise(posterior.history):
        if record["kind"] == "move":
            assert record["particles"] == round(50 + 250 * before["visited"] / 800)
    assert counts[-1] > 100


def test_local_kernels_keep_the_modes() -> None:
    """The paper's batch of 10, the guard of kernels, moves when degenerate."""
    problem, x, grid = two_modes()
    posterior = pmd.fit(
        problem, x, num_particles=1500, passes=3, progress=False,
        density=pmd.densities.kernel(pmd.densities.local()),
    )  # fmt: skip
    # After 3 passes the minibatches leave some .1 of the mass open.
    assert abs(mass(posterior) - grid.first_mode) < 0.15
    floor = 0.3 * 1500
    assert min(record["ess"] for record in steps(posterior)) > 0.5 * floor
    assert posterior.certificate.minibatch_noise > 0


# ------------------------------------------------------------------ start, batch likelihood


def test_another_start_has_the_same_posterior() -> None:
    wide = (lambda key: 5.0 + 4.0 * jax.random.normal(key),
            lambda t: targets.log_normal(t - 5.0, 4.0))  # fmt: skip
    posterior = fit(start=wide)
    check(posterior, MEAN.truth)
    never = fit(start=wide, rejuvenate=pmd.never(), full_passes=1, num_particles=2000)
    # one step with g = 1 leaves nothing of the start, whatever came before
    error = 1 / np.sqrt(float(never.ess))
    assert MEAN.truth.error(flat(never.mean())) < 4 * error
    assert abs(never.log_evidence - MEAN.truth.log_evidence) < 4 * never.log_evidence_error


def test_the_batch_likelihood_gives_the_same_run() -> None:
    problem = pmd.Problem(
        MEAN.problem.log_prior,
        sample_prior=MEAN.problem.sample_prior,
        log_likelihood_batch=lambda t, rows: targets.log_normal(rows - t, 2.0),
    )
    posterior = pmd.fit(problem, MEAN.data, num_particles=FEW, passes=3, progress=False)
    check(posterior, MEAN.truth)
    assert posterior.log_evidence == pytest.approx(usual().log_evidence, abs=1e-3)


# ------------------------------------------------------------------ one compilation, one result


def test_one_compilation_of_the_loop() -> None:
    """Growing batches, changing particle numbers, minibatches and full steps: one program."""
    problem = targets.gaussian_mean().problem  # new, so that nothing is compiled for it yet
    before = compiled()
    posterior = pmd.fit(problem, MEAN.data, num_particles=FEW, passes=3, progress=False)
    assert len({record["rows"] for record in steps(posterior)}) > 3
    assert len({record["particles"] for record in steps(posterior)}) > 1
    assert compiled() == before + 1
    pmd.fit(problem, MEAN.data, num_particles=FEW, passes=4, seed=5, progress=False)
    assert compiled() == before + 1


def test_a_seed_gives_the_same_result_and_another_another() -> None:
    first, again, other = usual(), fit(), fit(seed=1)
    np.testing.assert_array_equal(first.log_weights, again.log_weights)
    np.testing.assert_array_equal(first.particles, again.particles)
    assert first.log_evidence == again.log_evidence
    assert first.log_evidence != other.log_evidence
    told = [{k: v for k, v in record.items() if k != "seconds"} for record in first.history]
    more = [{k: v for k, v in record.items() if k != "seconds"} for record in again.history]
    assert repr(told) == repr(more)


# ------------------------------------------------------------------ what is told


def test_history_has_a_record_a_step_and_a_move() -> None:
    posterior = usual()
    done = steps(posterior)
    assert {"pass", "rows", "visited", "step_size", "planned", "ess", "log_normaliser",
            "particles", "evaluations"} <= set(done[0])  # fmt: skip
    assert done[-1]["rows"] == 300
    assert done[-1]["step_size"] == 1.0
    assert [record["visited"] for record in done] == list(
        itertools.accumulate(record["rows"] for record in done)
    )
    made = moves(posterior)
    assert made
    assert {"action", "density", "error", "audit", "particles", "refused", "seconds"} <= set(
        made[0]
    )
    assert {record["action"] for record in made} <= {"fit", "reweigh", "walk"}
    assert posterior.settings["plan"].startswith(f"{FEW} particles, 1 pass in batches growing")


def test_evaluations_are_counted() -> None:
    """Particles times rows over N for steps; what checks cost on top."""
    posterior = usual()
    stepped = sum(record["particles"] * record["rows"] for record in steps(posterior)) / 300
    assert posterior.evaluations >= stepped
    last = posterior.history[-1]["evaluations"]
    assert posterior.evaluations == pytest.approx(last, abs=64)
    never = fit(rejuvenate=pmd.never())
    counted = [record["evaluations"] for record in steps(never)]
    assert (np.diff(counted) >= 0).all()
    # 3 passes of FEW particles, 64 draws tried on 16 rows before, 64 for the noise after
    assert never.evaluations == pytest.approx(3 * FEW + 64 * 16 / 300 + 64, abs=64)


def test_seconds_by_what_they_went_on() -> None:
    seconds = usual().settings["seconds"]
    assert {"likelihood", "move", "walk", "compile", "all"} <= set(seconds)
    assert sum(seconds[use] for use in ("likelihood", "move", "walk", "compile")) <= (
        seconds["all"] * 1.01 + 0.01
    )


def test_callback_gets_every_record_in_order() -> None:
    told: list[dict[str, Any]] = []
    posterior = fit(callback=told.append)
    assert told == posterior.history


@pytest.mark.parametrize("interrupt", [False, True], ids=["returns True", "Ctrl-C"])
@pytest.mark.parametrize("at", [3, 10**6], ids=["early", "at the end"])
def test_a_run_that_is_ended_returns_what_there_is(interrupt: bool, at: int) -> None:
    last = len(usual().history)
    at = min(at, last)
    told = []

    def callback(record: dict[str, Any]) -> bool:
        told.append(record)
        if len(told) == at and interrupt:
            raise KeyboardInterrupt
        return len(told) == at

    posterior = fit(callback=callback)
    said = posterior.settings["stopped"]
    assert said == ("interrupted" if interrupt else "stopped by the callback")
    assert len(told) == at
    assert np.isfinite(flat(posterior.mean())).all()
    assert posterior.certificate.exact_last == (at == last)
    visited = max(record["visited"] for record in steps(posterior))
    assert visited >= steps_of(told)
    # what is told of the state is of this state
    ess = steps(posterior)[-1]["ess"]
    if posterior.history[-1]["kind"] == "step":
        assert float(posterior.ess) == pytest.approx(ess, rel=1e-3)


def steps_of(records: list[dict[str, Any]]) -> int:
    return max(record.get("visited", 0) for record in records)


def test_until_certified_ends_when_interrupted() -> None:
    runs = []

    def callback(record: dict[str, Any]) -> None:
        runs.append(record)
        raise KeyboardInterrupt

    posterior = fit(callback=callback, until="certified")
    assert len(runs) == 1
    assert posterior.settings["until"] == "not certified: interrupted"


def test_until_certified_says_how() -> None:
    posterior = fit(until="certified")
    assert posterior.certificate.verdict == "trust"
    assert posterior.settings["until"] == "certified as planned"
    # weighted draws of the prior are never trusted after so little, and no more is allowed
    posterior = fit(until="certified", evaluations=500, rejuvenate=pmd.never())
    assert posterior.settings["until"] == "not certified: the budget is spent"
    assert posterior.evaluations <= 500


def test_seconds_end_a_run() -> None:
    posterior = fit(seconds=1e-3, passes=500, batch_size=1, full_passes=0, density=None)
    assert posterior.settings["stopped"] == "stopped after 0.001 seconds"
    assert len(steps(posterior)) < 500 * 300
    assert np.isfinite(flat(posterior.mean())).all()
    assert posterior.certificate.verdict != "trust"


@pytest.mark.parametrize("budget", [300, 2000])
@pytest.mark.parametrize(
    "given", [{}, {"rejuvenate": pmd.never()}, {"density": pmd.densities.gaussian()}],
    ids=["default", "never", "gaussian"],
)  # fmt: skip
def test_a_budget_of_evaluations_is_kept_to(given: Any, budget: int) -> None:
    posterior = fit(evaluations=budget, num_particles=None, passes=None, **given)
    assert posterior.evaluations <= budget
    if not given:
        assert MEAN.truth.error(flat(posterior.mean())) < 0.1


# ------------------------------------------------------------------ how far fits are checked


@pytest.mark.parametrize("exact", ["never", "always"])
def test_exact(exact: str) -> None:
    posterior = fit(exact=exact, batch_size=30)
    check(posterior, MEAN.truth)
    made = [record["action"] for record in moves(posterior)]
    # before a step on all rows nothing is checked: it makes the weights exact itself
    before_full = [
        following["kind"] == "step" and following["rows"] == 300
        for record, following in itertools.pairwise(posterior.history)
        if record["kind"] == "move"
    ]
    for action, last in zip(made, before_full, strict=False):
        assert action == "fit" if exact == "never" or last else action in ("reweigh", "walk")
    if exact == "always":
        assert posterior.certificate.reweighed + posterior.certificate.walked > 0


def test_a_kernel_is_weighed_exactly_where_asked() -> None:
    kernel = pmd.densities.kernel(pmd.densities.scott())
    posterior = fit(density=kernel, exact="always")
    made = [record["action"] for record in moves(posterior)]
    assert made
    assert set(made) == {"reweigh"}
    # all weights are exact: c of this run's batches, at every particle
    assert posterior.certificate.reweighed == len(made)


# ------------------------------------------------------------------ what is impossible, what is NaN


def test_impossible_parameters_weigh_nothing() -> None:
    """x ~ U(0, theta): log q is -inf below the largest x.  Posterior by quadrature."""
    x = np.random.default_rng(0).uniform(0, 2.0, 60).astype(np.float32)
    problem = pmd.Problem(
        log_prior=lambda t: targets.log_normal(t - 1.0),
        log_likelihood=lambda t, row: jnp.where(row < jnp.exp(t), -t, -jnp.inf),
        sample_prior=lambda key: 1.0 + jax.random.normal(key),
    )
    posterior = pmd.fit(
        problem, x, num_particles=1000, passes=3, progress=False, exact="always",
        density=pmd.densities.gaussian(max_components=1), full_passes=2,
    )  # fmt: skip
    axis = np.log(x.max()) + np.linspace(0, 8, 400001)[1:]
    log_q = targets.log_normal(axis - 1.0) - 60 * axis
    w = np.exp(log_q - log_total(log_q))
    mean = w @ axis
    sd = np.sqrt(w @ (axis - mean) ** 2)
    particles = np.asarray(posterior.particles)
    alive = np.isfinite(np.asarray(posterior.log_weights))
    assert (alive == (np.exp(particles) > x.max())).all()
    n = float(posterior.ess)
    estimate = float(posterior.mean(using="particles"))
    assert abs(estimate - mean) < 4 * sd / np.sqrt(n)
    evidence = log_total(log_q) + np.log(axis[1] - axis[0])
    assert abs(posterior.log_evidence - evidence) < 4 * posterior.log_evidence_error + 0.01


def poisoned(where: Any) -> targets.Target:
    """NaN for rows beyond the first 200 at the parameters that `where` tells."""
    rows = np.stack([MEAN.data, np.arange(300) >= 200], axis=1).astype(np.float32)
    problem = pmd.Problem(
        MEAN.problem.log_prior,
        lambda t, row: jnp.where(
            (row[1] > 0) & where(t), jnp.nan, targets.log_normal(row[0] - t, 2.0)
        ),
        MEAN.problem.sample_prior,
    )
    return targets.Target(problem, rows, MEAN.truth)


def test_a_nan_stops_the_run_and_hands_back_the_last_good_state() -> None:
    target = poisoned(lambda t: t > -5.0)
    with pytest.raises(NotFiniteError) as caught:
        fit(target)
    message = str(caught.value)
    assert isinstance(caught.value, pmd.PmdError)
    assert message.startswith("log_likelihood is NaN or +inf at step ")
    step = int(message.split("step ")[1].split(",")[0])
    row = int(message.split("row ")[1].split(",")[0])
    assert row >= 200
    told = float(message.split("under the parameter ")[1].split(";")[0])
    assert told > -5.0
    posterior = caught.value.posterior
    assert isinstance(posterior, pmd.Posterior)
    assert posterior.settings["stopped"] == "stopped by a NaN"
    assert np.isfinite(flat(posterior.mean())).all()
    assert not posterior.certificate.exact_last
    assert len([r for r in steps(posterior) if r["step_size"] > 0]) == step - 1


def test_a_nan_at_draws_of_a_move_stops_the_run() -> None:
    """The prior's draws are fine; those of a fit, between them, are not."""
    target = poisoned(lambda t: t > np.inf)  # never
    view = target.problem.flat()
    drawn = np.sort(np.asarray(view.sample(jax.random.key(0), jnp.arange(4096)))[:, 0])
    assert drawn.size == 4096

    def between(t: Any) -> Any:
        gap = jnp.abs(t - jnp.asarray(drawn)).min()
        return gap > 0

    problem = pmd.Problem(
        MEAN.problem.log_prior,
        lambda t, row: jnp.where(between(t), jnp.nan, targets.log_normal(row - t, 2.0)),
        lambda key: jnp.asarray(drawn)[jax.random.randint(key, (), 0, 4096)],
    )
    with pytest.raises(NotFiniteError, match=r"NaN or \+inf at a move after step \d+, on the") as e:
        pmd.fit(problem, MEAN.data, num_particles=FEW, exact="always", progress=False)
    posterior = e.value.posterior
    assert isinstance(posterior, pmd.Posterior)
    assert np.isfinite(np.asarray(posterior.log_weights)).any()


def test_a_prior_that_is_nan_at_draws_of_a_move_is_named() -> None:
    """log_prior is NaN below -1; the sampler does not go there, a fit does."""
    x = -0.9 + 0.05 * np.random.default_rng(0).standard_normal(300).astype(np.float32)
    problem = pmd.Problem(
        lambda t: jnp.where(t < -1.0, jnp.nan, -jnp.log(2.0)),
        lambda t, row: targets.log_normal(row - t, 2.0),
        lambda key: jax.random.uniform(key, (), jnp.float32, -1.0, 1.0),
    )
    with pytest.raises(NotFiniteError, match=r"log_prior is NaN or .*under the parameter -1"):
        pmd.fit(problem, x, num_particles=FEW, exact="never", progress=False)
