"""Rows that come in batches and cannot be read again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmd.errors import InputError, InputTypeError
from pmd.mirror import Batch
from pmd.rows import as_rows

PyTree = Any


@dataclass(frozen=True)
class Stream:
    """Batches of rows from an iterable; made by `pmd.data.stream`."""

    batches: Iterable[PyTree]
    num_data: int

    def __iter__(self) -> Iterator[tuple[PyTree, int]]:
        """Checked batches, as arrays, and their numbers of rows; pass after pass if it can."""
        while True:
            count = 0
            for batch in self.batches:
                count += 1
                yield as_rows(batch)
            if count == 0 or iter(self.batches) is self.batches:
                return


def stream(batches: Iterable[PyTree], num_data: int) -> Stream:
    """Rows in batches, in the order in which they come, for `pmd.fit`.

    The exact iterate cannot be evaluated on rows that are gone: `exact="auto"` becomes "never",
    there are no steps on all rows, and the result says so.

    Args:
        batches: an iterable of batches, each a pytree of arrays of rows. A list, or anything that
            can be iterated over again, is; an iterator or generator is read once.
        num_data: how many rows there are in all; a batch of B stands for all of them, N/B times.

    Example:
        >>> import numpy as np, pmd
        >>> pmd.data.stream([np.zeros(10), np.ones(10)], num_data=20).num_data
        20
    """
    if not isinstance(batches, Iterable):
        raise InputTypeError(f"batches must be iterable, got {type(batches).__name__}")
    if isinstance(num_data, bool) or not isinstance(num_data, int | np.integer):
        raise InputTypeError(f"num_data must be the number of rows in all, got {num_data!r}")
    if num_data < 1:
        raise InputError(f"num_data must be at least 1, got {num_data}")
    return Stream(batches, int(num_data))


def padded_batch(rows: PyTree, size: int, room: int, num_data: int) -> Batch:
    """A batch with rows repeated up to `room` and masked; its rows have no numbers."""

    def pad(leaf: Any) -> Any:
        return jnp.concatenate([leaf, jnp.broadcast_to(leaf[:1], (room - size, *leaf.shape[1:]))])

    index = jnp.full(room, num_data, jnp.int32)  # beyond the end: no row weight is kept
    return Batch(jax.tree.map(pad, rows), index, jnp.arange(room) < size)
