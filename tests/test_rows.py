"""Rows in memory: what is accepted, and the order in which they are visited."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas
import pytest

from pmd.errors import InputError, InputTypeError, PmdError
from pmd.rows import Order, as_rows


@pytest.mark.parametrize(
    "data",
    [
        np.ones(7),
        np.ones((7, 3), np.float32),
        (np.ones((7, 3)), np.arange(7)),
        {"x": np.ones((7, 2, 2)), "seen": np.ones(7, bool)},
        [jnp.ones(7), jnp.ones((7, 1))],
        pandas.DataFrame({"a": np.ones(7), "b": np.arange(7)}),
        (pandas.DataFrame({"a": np.ones(7)}), pandas.Series(np.arange(7))),
    ],
    ids=["vector", "matrix", "tuple", "dict", "list", "frame", "frame and series"],
)
def test_pytrees_of_arrays_with_a_common_first_axis(data: Any) -> None:
    _, number = as_rows(data)
    assert number == 7


def test_data_come_back_as_they_went_in() -> None:
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    rows, _ = as_rows((frame, [np.arange(3)]))
    np.testing.assert_array_equal(rows[0], frame.to_numpy())
    np.testing.assert_array_equal(rows[1][0], [0, 1, 2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "data is empty"),
        ((), "data is empty"),
        ({}, "data is empty"),
        (np.zeros((0, 3)), "no rows"),
        (3.0, "data is a single number: rows lie along the first axis"),
        ((np.ones(5), np.ones(6)), r"as many rows: data\[0\] has 5, data\[1\] has 6"),
        ({"x": np.ones(5), "y": np.ones((4, 2))}, r"data\[x\] has 5, data\[y\] has 4"),
        (np.array([1.0, np.nan, 2.0]), r"data has NaN or infinite values in 1 rows \(row 1\)"),
        ({"x": np.array([[1.0, 0], [2.0, np.inf]])}, r"data\[x\] has NaN.*\(row 1\): drop"),
        (np.full((90, 2), np.nan), r"in 90 rows \(row 0, 1, 2, 3, 4, \.\.\.\)"),
        ([[1.0, 2.0], [3.0]], "rows lie along the first axis of an array"),
        (np.array([1e300, 2.0]), r"data has values too large for float32 in 1 rows \(row 0\)"),
        (np.array([1, 2**40]), r"data has values too large for int32 in 1 rows \(row 1\)"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        as_rows(data)
    assert isinstance(caught.value, PmdError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.array(["a", "b"]), "data holds .* rows must be real numbers"),
        ((np.ones(2), np.array([1j, 2])), r"data\[1\] holds complex128"),
        (np.array([1.0, None]), "data holds object"),
        (np.array(["2020-01-01"], "datetime64[D]"), "encode text and dates first"),
    ],
)
def test_rows_of_another_kind(data: Any, message: str) -> None:
    with pytest.raises(InputTypeError, match=message) as caught:
        as_rows(data)
    assert isinstance(caught.value, TypeError)


# ------------------------------------------------------------------ the order


def test_a_pass_is_a_permutation_and_passes_differ() -> None:
    order = Order(100, seed=3, replace=False)
    passes = [order.of_pass(k) for k in range(4)]
    for one in passes:
        assert sorted(one) == list(range(100))
    assert len({tuple(one) for one in passes}) == 4
    np.testing.assert_array_equal(passes[2], Order(100, 3, False).of_pass(2))
    assert (passes[0] != Order(100, 4, False).of_pass(0)).any()


def test_with_replacement_rows_are_drawn_independently() -> None:
    order = Order(50, seed=1, replace=True)
    drawn = np.concatenate([order.of_pass(k) for k in range(200)])
    counts = np.bincount(drawn, minlength=50)
    # 10,000 independent draws of 50 rows: chi-square with 49 degrees of freedom, sd sqrt(98)
    chi = ((counts - 200) ** 2 / 200).sum()
    assert abs(chi - 49) < 4.5 * np.sqrt(98)
    assert len(set(order.of_pass(0))) < 50


def test_windows_show_two_passes_on() -> None:
    order = Order(10, seed=0, replace=False)
    for position in (0, 3, 9, 10, 27):
        shown, start = order.window(position)
        number = position // 10
        assert start == position - 10 * number
        both = np.concatenate([order.of_pass(number), order.of_pass(number + 1)])
        np.testing.assert_array_equal(shown, both)
