"""The mixture experiment: batches are the floor's, scores make sense, settings are checked."""

import jax.numpy as jnp
import numpy as np
import pytest

import pmd
from pmd.errors import InputError
from pmd.experiments import mixture, mixture_report
from pmd.experiments.grid import row_weights
from pmd.experiments.mixture import FLOOR, FLOOR_REPLACE, Result, Settings, Strategy
from pmd.plan import make_plan
from pmd.rows import as_rows
from pmd.run import Run

PAPERS = (Strategy.NEVER, Strategy.EVERY_STEP, Strategy.SWITCH)


@pytest.fixture(scope="module")
def small() -> Result:
    """The paper's strategies with few particles and a short run."""
    return mixture.run(Settings(1, 2, PAPERS, passes=1.0, num_particles=100))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("strategy", PAPERS)
def test_runs_see_the_batches_and_steps_of_the_floor(strategy: Strategy, replace: bool) -> None:
    """The row weights of a run's state are those of mirror descent on the grid."""
    rows, num_data = as_rows(mixture.data(1)[:60])
    given = {"num_particles": 20, "rejuvenate": None, "density": None, "batch_size": None}
    given |= mixture.options(strategy, 20)
    plan = make_plan(
        num_data, 2, **given, passes=2.0, full_passes=None, step_size=None, exact=None,
        replace=replace, evaluations=None, seconds=None,
    )  # fmt: skip
    run = Run(mixture.problem().flat(), rows, plan, seed=4)
    run.minibatches()
    found = np.asarray(run.state.scale * run.state.row_weights)
    floor = row_weights(60, 10, pmd.schedules.rows_visited(), [120], seed=4, replace=replace)
    np.testing.assert_allclose(found, floor[0], rtol=2e-5, atol=1e-6)


def test_every_run_leaves_a_row(small: Result) -> None:
    for strategy in PAPERS:
        found = mixture_report.series(small, strategy)
        assert list(found) == small.settings.lengths(strategy) == [0.25, 0.5, 1.0]
        assert [[row["visited"] for row in rows] for rows in found.values()] == [
            [250, 250],
            [500, 500],
            [1000, 1000],
        ]
        assert sorted(row["seed"] for row in found[1.0]) == [0, 1]
    for name in (FLOOR, FLOOR_REPLACE):
        assert set(mixture_report.series(small, name)) >= {0.25, 0.5, 1.0}
    assert mixture_report.series(small, Strategy.DEFAULT) == {}


def test_scores_are_those_of_densities(small: Result) -> None:
    for row in small.rows:
        assert 0 <= row["total_variation"] <= 1
        assert row["kl"] >= -1e-6
        # Pinsker's inequality, with room for sums over the grid.
        assert row["total_variation"] <= np.sqrt(max(row["kl"], 0) / 2) + 0.01
        assert row["integral"] == pytest.approx(1, abs=0.02)
        assert row["cross_entropy"] - small.truth.entropy == pytest.approx(row["kl"], abs=0.02)


def test_the_floor_falls_and_replacement_is_worse() -> None:
    """After five passes; mean over data and order of rows."""
    ends: dict[str, list[float]] = {FLOOR: [], FLOOR_REPLACE: []}
    for seed in (1, 2, 3):
        settings = Settings(seed, 1, (), points=61)
        model, x = mixture.problem(), mixture.data(seed)
        result = mixture.truth_of(settings, model, x)
        for row in mixture.floor(result, model, x, seed):
            if row["passes"] == 5.0:
                ends[row["strategy"]].append(row["total_variation"])
    assert np.mean(ends[FLOOR]) < 0.1 < np.mean(ends[FLOOR_REPLACE])


def test_the_default_passes_below_the_floor() -> None:
    settings = Settings(2, 1, (Strategy.DEFAULT,), passes=2.0, num_particles=400, points=121)
    result = mixture.run(settings)
    (row,) = [row for row in result.rows if row["strategy"] == Strategy.DEFAULT]
    floor = [row for row in result.rows if row["strategy"] == FLOOR][-1]
    assert row["total_variation"] < 0.01 < floor["total_variation"]
    assert row["mode_mass_error"] < 0.01
    assert abs(row["log_evidence_error"]) < 0.05
    np.testing.assert_allclose(np.exp(result.estimates[Strategy.DEFAULT]).sum(), 178, rtol=0.02)


def test_options_are_what_the_paper_says() -> None:
    told = mixture.options(Strategy.EVERY_STEP, 1500)
    growth = told["num_particles"]
    assert (growth(0.0, 1000), growth(1.0, 1000)) == (300, 1500)
    rule = told["density"].rule
    theta = jnp.zeros((400, 2))
    found = rule(None, theta, jnp.ones(400) / 400, jnp.asarray(400))
    assert found.chol[0, 0, 0] == pytest.approx(mixture.WIDTH / 20)  # c m^(-1/2)
    assert mixture.options(Strategy.DEFAULT, 1500) == {"num_particles": 1500}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"passes": 0.0}, "passes must lie between"),
        ({"passes": 0.333}, "two decimals"),
        ({"data_seed": -1}, "seed"),
    ],
)
def test_wrong_settings_are_named(wrong: dict, told: str) -> None:
    with pytest.raises(InputError, match=told):
        Settings(**wrong)


def test_data_are_the_models() -> None:
    """Mean and variance of a mixture of N(1, 2.5^2) and N(-1, 2.5^2), to four standard errors."""
    x = np.concatenate([mixture.data(seed) for seed in range(20)]).astype(float)
    variance = 2.5**2 + 1
    assert abs(x.mean()) < 4 * np.sqrt(variance / len(x))
    assert x.var() == pytest.approx(variance, abs=4 * variance * np.sqrt(2 / len(x)))
    assert x.dtype == np.float64
    assert mixture.data(1).dtype == np.float32
