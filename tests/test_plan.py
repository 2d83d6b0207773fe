"""The plan of a run: every default, every piece that can be given, and budgets."""

from typing import Any

import numpy as np
import pytest

import pmd
from pmd import schedules
from pmd.budget import Budget
from pmd.errors import InputError, InputTypeError
from pmd.plan import Plan, default_full_passes, default_particles, make_plan


def plan_of(num_data: int = 1000, dimension: int = 2, **given: Any) -> Plan:
    nothing: dict[str, Any] = dict.fromkeys(
        ["num_particles", "passes", "batch_size", "full_passes", "step_size", "density",
         "rejuvenate", "exact", "evaluations", "seconds"]
    )  # fmt: skip
    arguments: dict[str, Any] = nothing | {"replace": False} | given
    return make_plan(num_data, dimension, **arguments)


def all_steps(plan: Plan, chunk: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """All steps of the minibatch phase, asked for a few at a time."""
    sizes, fractions, visited = [], [], 0
    while visited < plan.budget:
        size, g = plan.steps(visited, len(sizes), chunk)
        sizes.extend(size)
        fractions.extend(g)
        visited += int(size.sum())
    return np.array(sizes), np.array(fractions)


def test_the_default_plan() -> None:
    plan = plan_of(10000)
    assert plan.passes == 5
    assert plan.full_passes == 2
    assert plan.num_particles == 1500
    assert plan.exact == "auto"
    assert not plan.replace
    assert plan.rejuvenate == pmd.when_degenerate(0.5)
    assert plan.first_batch == 50  # N / 200
    assert plan.describe() == (
        "1500 particles, 3 passes in batches growing from 50 to 10000 rows, "
        "then 2 steps on all 10000 rows, the last exact"
    )
    sizes, g = all_steps(plan)
    assert sizes.sum() == 30000 == plan.budget
    assert (np.diff(sizes)[:-1] >= 0).all()
    assert sizes.max() <= 10000
    # from N/200 to N by equal factors over three passes
    assert len(sizes) < 200
    before = np.cumsum(sizes) - sizes
    expected = 50 * 200.0 ** (before / 30000)
    np.testing.assert_array_equal(sizes[:-1], expected.astype(int)[:-1])
    np.testing.assert_allclose(g, 2 * sizes / (before + 20000))


@pytest.mark.parametrize("num_data", [1, 3, 10, 57, 1000])
@pytest.mark.parametrize("passes", [1, 2, 3, 4.5, 12])
def test_steps_add_up_to_the_passes(num_data: int, passes: float) -> None:
    for batch_size in (None, 1, num_data):
        plan = plan_of(num_data, passes=passes, batch_size=batch_size)
        sizes, g = all_steps(plan)
        assert sizes.sum() == plan.budget
        assert plan.budget + plan.full_passes * num_data == round(passes * num_data)
        assert ((sizes > 0) & (sizes <= num_data)).all()
        assert ((g > 0) & (g <= 1)).all()


def test_steps_do_not_depend_on_how_they_are_asked_for() -> None:
    plan = plan_of(777, passes=4)
    for one, other in zip(all_steps(plan, 1), all_steps(plan, 1000), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_number_fixes_the_batches_and_leaves_the_full_steps() -> None:
    plan = plan_of(105, batch_size=10, passes=3)
    sizes, _ = all_steps(plan)
    assert plan.full_passes == 2
    assert sizes.tolist() == [10] * 10 + [5]  # the last short one is used
    assert plan_of(105, batch_size=10, full_passes=0).full_passes == 0


@pytest.mark.parametrize(
    ("passes", "full"), [(0.5, 0), (1, 0), (2, 1), (3, 2), (5, 2), (10, 3), (20, 6)]
)
def test_steps_on_all_rows(passes: float, full: int) -> None:
    """max(2, .3 passes), but a pass is left for the minibatches where there is one."""
    assert default_full_passes(passes) == full


@pytest.mark.parametrize(
    "given",
    [
        {"rejuvenate": pmd.never()},
        {"rejuvenate": pmd.every_step()},
        {"rejuvenate": pmd.switch(pmd.every_step(), pmd.never(), after=1)},
        {"density": pmd.densities.kernel()},
        {"density": pmd.densities.gaussian()},
    ],
    ids=["never", "every_step", "switch", "kernel", "gaussian"],
)
def test_the_papers_own_strategies_keep_to_the_paper(given: Any) -> None:
    plan = plan_of(1000, **given)
    assert plan.batch_size == 10
    assert plan.full_passes == 0
    assert plan.exact == "never"
    assert plan_of(4, **given).batch_size == 4
    # and every piece can still be given
    other = plan_of(1000, exact="always", full_passes=2, batch_size=100, **given)
    assert (other.exact, other.full_passes, other.batch_size) == ("always", 2, 100)


def test_the_number_of_particles_follows_from_the_dimension() -> None:
    assert [default_particles(d) for d in (1, 12, 20, 50)] == [1500, 1500, 1600, 4000]
    quadratic = lambda d: (d + 1) * (d + 2) // 2  # noqa: E731
    for d in (1, 5, 20, 50, 100, 200):
        assert default_particles(d) >= 1.49 * quadratic(d)


def test_growing_particle_numbers() -> None:
    plan = plan_of(1000, num_particles=schedules.geometric(200, 1500), passes=4, full_passes=0)
    assert plan.scheduled
    counts = [plan.particles_at(done) for done in np.linspace(0, 1, 9)]
    assert counts[0] == 200
    assert counts[-1] == 1500 == plan.most_particles
    assert (np.diff(counts) > 0).all()
    hump = plan_of(num_particles=lambda done, n: 100 + 800 * done * (1 - done))
    assert hump.most_particles == 300


@pytest.mark.parametrize("after", [0.1, 0.3, 0.7, 1.3])
def test_a_switch_changes_policy_and_particles_at_the_same_row(after: float) -> None:
    policy = pmd.switch(pmd.every_step(), pmd.never(), after=after, num_particles=(5, 50))
    plan = plan_of(333, rejuvenate=policy, passes=2)
    assert plan.most_particles == 50
    for visited in range(plan.budget + 1):
        few = policy.at(visited / 333).always
        assert plan.particles_at(visited / plan.budget) == (5 if few else 50)


def test_step_sizes() -> None:
    _, g = all_steps(plan_of(step_size=0.25))
    assert (g == 0.25).all()
    _, g = all_steps(plan_of(step_size=schedules.power(1.0, 0.0)))
    np.testing.assert_allclose(g, 1 / np.arange(1, len(g) + 1), rtol=1e-6)


@pytest.mark.parametrize("wrong", [0.0, 1.01, -0.2, np.nan])
def test_a_schedule_out_of_range_is_refused(wrong: float) -> None:
    def schedule(t: Any, visited: Any, batch_size: Any, num_data: Any) -> Any:
        return np.where(t == 3, wrong, 0.1)

    with pytest.raises(InputError, match=r"step_size is .* at step 3: .* \(0, 1\]"):
        plan_of(step_size=schedule).steps(0, 0, 5)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_particles": 0}, "num_particles must be at least 1, got 0"),
        ({"num_particles": -3}, "num_particles must be at least 1, got -3"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 1001}, "batch_size is 1001, but there are only 1000 rows"),
        ({"passes": -1}, "passes must be at least 0 and finite, got -1"),
        ({"passes": 0}, "passes must be positive, got 0"),
        ({"passes": np.nan}, "passes must be at least 0 and finite"),
        ({"passes": np.inf}, "passes must be at least 0 and finite"),
        ({"full_passes": -1}, "full_passes must be at least 0, got -1"),
        ({"full_passes": 7}, "full_passes is 7, more than all 5.0 passes"),
        ({"step_size": 0.0}, r"step_size is a mixing fraction in \(0, 1\]"),
        ({"step_size": 1.5}, r"step_size is a mixing fraction in \(0, 1\]"),
        ({"exact": "sometimes"}, 'exact must be "auto", "never" or "always"'),
        ({"evaluations": 0}, "evaluations must be positive, got 0"),
        ({"evaluations": -5.0}, "evaluations must be at least 0 and finite, got -5"),
        ({"seconds": 0}, "seconds must be positive, got 0"),
        (
            {"num_particles": schedules.linear(5, 9), "rejuvenate": pmd.never()},
            "num_particles is a schedule, but under .* particles stay: give a number",
        ),
        ({"seconds": -1}, "seconds must be at least 0 and finite, got -1"),
    ],
)
def test_values_that_make_no_plan(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_particles": 10.5}, "num_particles must be a whole number, got 10.5"),
        ({"num_particles": True}, "num_particles must be a whole number"),
        ({"num_particles": "many"}, "num_particles must be a whole number"),
        ({"batch_size": 2.0}, "batch_size must be a whole number"),
        ({"full_passes": 1.5}, "full_passes must be a whole number"),
        ({"passes": "3"}, "passes must be a number"),
        ({"evaluations": "all"}, "evaluations must be a number"),
        ({"seconds": "60"}, "seconds must be a number"),
        ({"step_size": "fast"}, "step_size must be a number, got 'fast'"),
        ({"step_size": [0.1]}, "step_size must be a number"),
        ({"density": "kernel"}, r"density must be one of pmd\.densities"),
        ({"density": pmd.densities.kernel}, r"density must be one of pmd\.densities"),
        ({"rejuvenate": pmd.never}, "rejuvenate must be a policy"),
        ({"rejuvenate": "never"}, "rejuvenate must be a policy"),
    ],
)
def test_arguments_of_another_kind(given: Any, message: str) -> None:
    with pytest.raises(InputTypeError, match=message):
        plan_of(**given)


# ------------------------------------------------------------------ budgets


def test_a_budget_decides_on_the_particles() -> None:
    few = plan_of(evaluations=500.0)
    assert few.passes == 3
    assert 8 <= few.most_particles <= 500 / 3
    assert plan_of(evaluations=1e9).num_particles == 1500
    assert plan_of(evaluations=500.0, num_particles=70).num_particles == 70


def test_a_budget_pays_for_what_is_left() -> None:
    plan = plan_of(1000, evaluations=600.0, passes=3)  # one pass in minibatches, two full steps
    budget = Budget(plan, 100)
    assert budget.limited
    assert budget.affordable(1000, 0.0, 0) == 398  # (600 - 2 - 2 x 100) / 1
    assert budget.affordable(50, 0.0, 0) == 50
    assert budget.affordable(1000, 300.0, 1000) == 149  # 298 left for two full steps
    assert budget.allowance(100.0, 500, 100) == pytest.approx(598 - 100 - 0.5 * 100 - 2 * 100)
    assert budget.pays(598.0, 0.0)
    assert not budget.pays(98.1, 500.0)
    free = Budget(plan_of(), 100)
    assert not free.limited
    assert free.affordable(12345, 1e9, 0) == 12345
    assert free.allowance(1e9, 0, 100) == np.inf
