"""Rows held in memory: checking them, and the order in which they are visited."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmd.errors import InputError, InputTypeError
from pmd.structure import key_path_name

PyTree = Any


def as_rows(data: PyTree) -> tuple[PyTree, int]:
    """Data as arrays on the device, and how many rows they have; says what is wrong with them."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(data)
    if not leaves:
        raise InputError("data is empty: give an array, or a tuple or dict of arrays, of rows")
    lengths: dict[str, int] = {}
    arrays = []
    for path, leaf in leaves:
        name = key_path_name(path)
        label = f"data[{name}]" if name else "data"
        arrays.append(as_array(label, leaf))
        lengths[label] = arrays[-1].shape[0]
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{label} has {n}" for label, n in lengths.items())
        raise InputError(f"all arrays of the data must have as many rows: {told}")
    num_data = next(iter(lengths.values()))
    if num_data == 0:
        raise InputError("data has no rows")
    return jax.tree.unflatten(treedef, arrays), num_data


def as_array(label: str, leaf: Any) -> Array:
    """An array on the device, of finite real numbers, with a leading axis of rows."""
    given = leaf if isinstance(leaf, Array) else np.asarray(leaf)
    floating = jnp.issubdtype(given.dtype, jnp.floating)
    if given.dtype.kind not in "fiub" and not floating:
        raise InputTypeError(
            f"{label} holds {given.dtype}: rows must be real numbers (encode text and dates first)"
        )
    if given.ndim == 0:
        raise InputError(
            f"{label} is a single number: rows lie along the first axis of an array "
            "(make lists of numbers arrays first)"
        )
    with np.errstate(over="ignore"):  # checked below
        array = jnp.asarray(given)
    if floating:
        refuse(label, ~np.isfinite(np.asarray(given)), "NaN or infinite values", "drop or impute")
    if given.dtype != array.dtype:
        largest = (jnp.finfo if floating else jnp.iinfo)(array.dtype).max
        what = f"values too large for {array.dtype}"
        refuse(label, abs(np.asarray(given)) > float(largest), what, "rescale or drop")
    return array


def refuse(label: str, wrong: np.ndarray, what: str, cure: str) -> None:
    """An error that tells the first few rows with something wrong, if there are any."""
    if not wrong.any():
        return
    which = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))
    told = ", ".join(map(str, which[:5])) + (", ..." if len(which) > 5 else "")
    raise InputError(f"{label} has {what} in {len(which)} rows (row {told}): {cure} them first")


class Order:
    """The order in which rows are visited: a pure function of the seed and the pass.

    Without replacement every pass is a fresh permutation, so that over whole passes every row
    counts alike; with replacement (the paper's) rows are drawn independently.
    """

    def __init__(self, num_data: int, seed: int, replace: bool):
        self.num_data, self.seed, self.replace = num_data, seed, replace
        self._window: tuple[int, Array] | None = None

    def of_pass(self, number: int) -> np.ndarray:
        """Row numbers of one pass."""
        bits = np.random.Philox(np.random.SeedSequence([self.seed, number]))
        random = np.random.Generator(bits)
        if self.replace:
            return random.integers(0, self.num_data, self.num_data, dtype=np.int32)
        return random.permutation(self.num_data).astype(np.int32)

    def window(self, position: int) -> tuple[Array, int]:
        """Two passes of row numbers on the device, and where in them `position` is."""
        number, start = divmod(position, self.num_data)
        if self._window is None or self._window[0] != number:
            both = np.concatenate([self.of_pass(number), self.of_pass(number + 1)])
            self._window = number, jnp.asarray(both)
        return self._window[1], start
