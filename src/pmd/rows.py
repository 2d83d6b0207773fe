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
    found = jax.tree_util.tree_leaves_with_path(data)
    if data is None or not found:
        raise InputError("data is empty: give an array, or a tuple or dict of arrays, of rows")
    lengths: dict[str, int] = {}
    for path, leaf in found:
        name = key_path_name(path)
        label = f"data[{name}]" if name else "data"
        array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        check_array(label, array)
        lengths[label] = array.shape[0]
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{label} has {n}" for label, n in lengths.items())
        raise InputError(f"all arrays of the data must have as many rows: {told}")
    num_data = next(iter(lengths.values()))
    if num_data == 0:
        raise InputError("data has no rows")
    return jax.tree.map(jnp.asarray, data), num_data


def check_array(label: str, array: Any) -> None:
    """An array of finite numbers with a leading axis of rows."""
    if array.dtype.kind not in "fiub" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputTypeError(
            f"{label} holds {array.dtype}: rows must be real numbers (encode text and dates first)"
        )
    if array.ndim == 0:
        raise InputError(f"{label} is a single number: rows lie along the first axis of an array")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return
    values = np.asarray(array)
    wrong = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if wrong.any():
        which = np.flatnonzero(wrong)
        told = ", ".join(map(str, which[:5])) + (", ..." if len(which) > 5 else "")
        raise InputError(
            f"{label} has NaN or infinite values in {len(which)} rows (row {told}): "
            "drop or impute them first"
        )


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
