"""The promised figures: a few seeds under `make test`, all of them under `make statistical`.

Targets, references and promises are those of `benchmarks`.  The long series can be stopped and
taken up again: finished runs are kept in `benchmarks/results`, for each version of the code.
"""

from typing import Any

import numpy as np
import pytest

from benchmarks import accuracy, references
from benchmarks.targets import target


def keeps(runs: list[dict[str, Any]]) -> None:
    """All that is promised holds, and no wrong result is trusted."""
    assert accuracy.missed(runs) == []
    trusted = [run for run in runs if run["wrong"] and run["verdict"] == "trust"]
    assert trusted == []


def short(name: str, seeds: range, **settings: Any) -> list[dict[str, Any]]:
    """A few runs."""
    return [accuracy.one_run(target(name), n, n, settings) | {"target": name, "settings": settings}
            for n in seeds]  # fmt: skip


def test_the_linear_models_reference_agrees_with_importance_sampling() -> None:
    """Quadrature over the log sd against 100,000 weighted draws."""
    task = target("linear")
    drawn = task.data(7)
    truth, found = task.reference(task, drawn), references.sampled(task, drawn)
    mean, cov = references.moments(found.theta, found.weight)
    error = 5 * np.sqrt((found.weight**2).sum())  # five standard errors of a standardised mean
    assert np.abs(mean - truth.mean).max() < error * truth.sd.max()
    np.testing.assert_allclose(np.sqrt(np.diag(cov)), truth.sd, rtol=error)
    assert abs(found.log_evidence - truth.log_evidence) < error


def test_mixture() -> None:
    """Two modes, three data sets."""
    keeps(short("mixture", range(10, 13), passes=3))


def test_three_means() -> None:
    """Six modes, two data sets."""
    keeps(short("means", range(10, 12), passes=3))


def test_linear() -> None:
    """Closed form, one data set."""
    keeps(short("linear", range(10, 11), passes=3))


@pytest.mark.parametrize(("name", "budget"), [("mixture", 500.0), ("linear", 700.0)])
def test_a_small_budget(name: str, budget: float) -> None:
    """Dear likelihoods: the budget is kept to, and the mean found.  One seed, where the promise
    is of the mean over ten: three times it."""
    (run,) = short(name, range(10, 11), evaluations=budget)
    assert run["evaluations"] <= budget
    assert run["mean_error"] <= 3 * accuracy.BUDGETS[name]


# ---------------------------------------------------------------- all of them
SERIES = [
    ("mixture", 100, {"passes": 3.0}),
    ("asymmetric", 100, {"passes": 3.0}),
    ("banana", 20, {"passes": 3.0}),
    ("linear", 20, {"passes": 3.0}),
    ("student", 20, {"passes": 3.0}),
    ("poisson", 20, {"passes": 3.0}),
    ("means", 100, {"passes": 3.0}),
    ("components", 20, {"passes": 3.0}),
    ("funnel", 20, {"passes": 3.0}),
    ("mixture", 10, {"evaluations": 500.0}),
    ("linear", 10, {"evaluations": 700.0}),
    ("student", 10, {"evaluations": 2000.0}),
    ("mixture", 5, {"density": "gaussian", "passes": 5.0}),
    ("mixture", 5, {"density": "gaussian", "passes": 10.0}),
    ("mixture", 5, {"density": "local", "passes": 5.0}),
    ("mixture", 5, {"density": "local", "passes": 10.0}),
    *[(name, 20, {"passes": 3.0, "exact": "never"}) for name in ("mixture", "means", "components")],
]


@pytest.mark.statistical
@pytest.mark.parametrize(("name", "seeds", "settings"), SERIES)
def test_series(name: str, seeds: int, settings: dict[str, Any]) -> None:
    """A long series; of right results of the default at most one in ten is refused trust."""
    out = accuracy.RESULTS.with_name(f"statistical-{accuracy.code()}.jsonl")
    runs = accuracy.series(name, range(3000, 3000 + seeds), settings, out)
    keeps(runs)
    right = [run for run in runs if not run["wrong"]]
    if settings == {"passes": 3.0}:
        assert sum(run["verdict"] != "trust" for run in right) <= len(right) / 10


@pytest.mark.statistical
def test_the_funnels_reference_agrees_with_nuts() -> None:
    """Quadrature over the two log sds against one chain of NUTS."""
    task = target("funnel")
    drawn = task.data(7)
    truth, theta = task.reference(task, drawn), references.nuts_draws(task, drawn, 10_000)
    error = 5 / np.sqrt(1000)  # an effective draw in ten
    assert (np.abs(theta.mean(0) - truth.mean) < error * truth.sd).all()
    np.testing.assert_allclose(theta.std(0), truth.sd, rtol=error)
