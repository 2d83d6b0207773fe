"""Step sizes and growth: the formulas, their meaning over whole passes, and when particles move."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from pmd import schedules
from pmd.errors import InputError, InputTypeError
from pmd.rejuvenate import every_step, never, switch, when_degenerate


@pytest.mark.parametrize("c", [1.0, 2.0, 3.0])
def test_rows_visited_is_the_usual_schedule_at_a_fixed_batch(c: float) -> None:
    """c B / (n + c N) = c / (t + c N / B), t counted from 0."""
    t, batch, rows = np.arange(50), 10, 1000
    g = schedules.rows_visited(c)(t + 1, t * batch, batch, rows)
    np.testing.assert_allclose(g, c / (t + c * rows / batch))


def test_rows_visited_enters_a_batch_with_its_own_likelihood() -> None:
    """In the first pass g is about B/N, so that a batch enters with weight one."""
    g = schedules.rows_visited(2.0)(1, 0, 37, 1000)
    assert g * 1000 / 37 == pytest.approx(1.0)


@pytest.mark.parametrize("c", [1.0, 2.0])
def test_rows_visited_forgets_the_start_like_a_power(c: float) -> None:
    """prod (1 - g) falls as (1 + n / (c N))^-c, whatever the batches are."""
    rows = 10000
    for sizes in (np.full(3000, 10), np.tile([1, 5, 24], 1000)):
        before = np.cumsum(sizes) - sizes
        g = schedules.rows_visited(c)(np.arange(1, 3001), before, sizes, rows)
        left, n = np.prod(1 - g), sizes.sum()
        assert left == pytest.approx((1 + n / (c * rows)) ** -c, rel=0.02)


def test_power_and_inverse_sqrt() -> None:
    t = np.array([1, 4, 100, 10000])
    np.testing.assert_allclose(
        schedules.power(2.0, 3.0, 0.7)(t, 0, 1, 1), 2.0 / (3.0 + t**0.7), rtol=1e-6
    )
    np.testing.assert_allclose(
        schedules.inverse_sqrt()(t, 0, 1, 1), 1 / (100 + np.sqrt(t)), rtol=1e-6
    )
    assert float(schedules.power(5.0, 0.0, 1.0)(2, 0, 1, 1)) == 1.0  # never above one
    np.testing.assert_allclose(schedules.power(1.0, 0.0, 1.0)(t, 0, 1, 1), 1 / t, rtol=1e-6)


def test_constant() -> None:
    assert schedules.constant(0.25)(7, 100, 3, 50) == 0.25


def test_theorem_kl() -> None:
    """min { 2 / (t + 1), Delta / (M m_t^(beta / (d + 2 beta))) }."""
    schedule = schedules.kl_theorem(0.5, 1.0, 2, lambda t: 100.0 * t)
    t = np.array([1.0, 2.0, 50.0, 1000.0])
    expected = np.minimum(2 / (t + 1), 0.5 / (100 * t) ** 0.25)
    np.testing.assert_allclose(schedule(t, 0, 1, 1), expected, rtol=1e-6)


@pytest.mark.parametrize("make", [schedules.geometric, schedules.linear])
def test_growth_goes_from_first_to_last(make: Any) -> None:
    grow = make(10, 1000)
    done = np.linspace(0, 1, 21)
    sizes = [grow(d, 5000) for d in done]
    assert sizes[0] == pytest.approx(10)
    assert sizes[-1] == pytest.approx(1000)
    assert (np.diff(sizes) > 0).all()
    assert grow(1.7, 5000) == pytest.approx(1000)
    assert make(10)(1.0, 5000) == pytest.approx(5000)
    changes = np.diff(np.log(sizes)) if make is schedules.geometric else np.diff(sizes)
    np.testing.assert_allclose(changes, changes[0])


def test_schedules_are_traceable() -> None:
    for schedule in (schedules.rows_visited(), schedules.power(), schedules.inverse_sqrt()):
        values = schedule(jnp.asarray(3), jnp.asarray(20), jnp.asarray(5), 100)
        assert 0 < float(values) <= 1


# ------------------------------------------------------------------ when particles move


def test_policies() -> None:
    assert never().never
    assert not never().always
    assert every_step().always
    assert not every_step().never
    half = when_degenerate()
    assert half.ess == 0.5
    assert not half.never
    assert not half.always
    assert half.at(3.0) is half


def test_switch_goes_from_one_to_the_other() -> None:
    policy = switch(every_step(), never(), after=0.5, num_particles=(200, 1500))
    assert policy.at(0.0).always
    assert policy.at(0.499).always
    assert policy.at(0.5).never
    assert not policy.always
    assert not policy.never


@pytest.mark.parametrize("ess", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_a_share_of_the_particles_lies_between_zero_and_one(ess: float) -> None:
    with pytest.raises(InputError, match="ess must lie between 0 and 1"):
        when_degenerate(ess)


def test_switch_checks_what_it_is_given() -> None:
    with pytest.raises(InputTypeError, match=r"first must be a policy such as pmd\.never\(\)"):
        switch(cast(Any, every_step), never(), after=1.0)
    with pytest.raises(InputTypeError, match="then must be a policy"):
        switch(every_step(), cast(Any, "never"), after=1.0)
    with pytest.raises(InputError, match="after must be a positive number of passes, got -1"):
        switch(every_step(), never(), after=-1)
    with pytest.raises(InputError, match=r"num_particles must be \(few, many\)"):
        switch(every_step(), never(), after=1, num_particles=cast(Any, (10,)))
    with pytest.raises(InputError, match=r"num_particles must be \(few, many\)"):
        switch(every_step(), never(), after=1, num_particles=(0, 5))
