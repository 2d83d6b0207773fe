"""Flat vectors and parameters on the host, in float64: what results are stated in.

Three forms of a parameter: free coordinates (d numbers, what particles are), plain numbers (the
user's own values in one row, D of them; D = d unless a constraint changes it), and the user's
own pytree.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from pmd.errors import InputError
from pmd.structure import Structure

PyTree = Any


class Parameters:
    """A structure's parameters as arrays of plain numbers, and back."""

    def __init__(self, structure: Structure):
        self.structure = structure
        self.leaves = structure.leaves
        self.sizes = [math.prod(leaf.shape) for leaf in self.leaves]
        self._constrain = jax.jit(jax.vmap(lambda v: ravel_pytree(structure.unravel(v))[0]))
        self._free = jax.jit(jax.vmap(self._ravel))
        self._log_det = jax.jit(jax.vmap(structure.log_det))

    @property
    def names(self) -> list[str]:
        """A name for each plain number."""
        plain = (dataclasses.replace(leaf, free_shape=leaf.shape) for leaf in self.leaves)
        return [name for leaf in plain for name in leaf.names]

    def tree(self, plain: np.ndarray) -> PyTree:
        """Plain numbers (..., D) in the user's own structure, every leaf with the leading axes."""
        pieces = np.split(plain, np.cumsum(self.sizes)[:-1], axis=-1)
        values = [
            piece.reshape(plain.shape[:-1] + leaf.shape)[()]
            for piece, leaf in zip(pieces, self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.structure.treedef, values)

    def flatten(self, theta: PyTree) -> tuple[np.ndarray, tuple[int, ...]]:
        """Plain numbers (n, D) of one parameter or of a batch, and the shape of the batch."""
        values, treedef = jax.tree.flatten(theta)
        if treedef != self.structure.treedef:
            raise InputError(f"theta must have the structure {self.structure.treedef}: {treedef}")
        arrays = [np.asarray(value, dtype=float) for value in values]
        first = self.leaves[0].shape
        shape = arrays[0].shape[: max(arrays[0].ndim - len(first), 0)]
        for array, leaf in zip(arrays, self.leaves, strict=True):
            if array.shape != shape + leaf.shape:
                batch = f", or (n, {', '.join(map(str, leaf.shape))}) for a batch"
                raise InputError(
                    f"theta: {leaf.path or 'the parameter'} has shape {array.shape}; it must be "
                    f"{leaf.shape} for one parameter{batch}, all leaves alike"
                )
        pairs = zip(arrays, self.sizes, strict=True)
        rows = [array.reshape(math.prod(shape), size) for array, size in pairs]
        return np.concatenate(rows, axis=1), shape

    def constrain(self, free: np.ndarray) -> np.ndarray:
        """Plain numbers (n, D) of free coordinates (n, d)."""
        if not self.structure.constrained:
            return free
        return self._many(self._constrain, free)

    def free(self, plain: np.ndarray) -> np.ndarray:
        """Free coordinates (n, d) of plain numbers (n, D); NaN outside the constraints."""
        if not self.structure.constrained:
            return plain
        found = self._many(self._free, plain)
        # A bijector's inverse may map what breaks the constraint somewhere: it does not come back.
        found[~np.isfinite(found).all(1)] = np.nan
        back = self.constrain(found)
        found[~np.isclose(back, plain, rtol=1e-3, atol=1e-6).all(1)] = np.nan
        return found

    def log_det(self, free: np.ndarray) -> np.ndarray:
        """log |d parameter / d free coordinates|, (n,)."""
        if not self.structure.constrained:
            return np.zeros(len(free))
        return self._many(self._log_det, free)

    def _ravel(self, plain: Array) -> Array:
        ends = np.cumsum(self.sizes)[:-1]
        pieces = jnp.split(plain, ends)
        values = [p.reshape(leaf.shape) for p, leaf in zip(pieces, self.leaves, strict=True)]
        return self.structure.ravel(jax.tree.unflatten(self.structure.treedef, values))

    def _many(self, function: Callable[[Array], Array], rows: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            return np.array(function(jnp.asarray(rows, float)), dtype=float)
