"""Between a parameter as the user writes it (a pytree) and a flat vector without constraints."""

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pmd.errors import InputError, InputTypeError, require

PyTree = Any


@dataclass(frozen=True)
class Leaf:
    """One array of the parameter: its place, its shape, its bijector from free coordinates."""

    path: str
    shape: tuple[int, ...]
    free_shape: tuple[int, ...]
    bijector: Any = None
    constraint: str | None = None

    @property
    def size(self) -> int:
        """How many free coordinates the array has."""
        return math.prod(self.free_shape)

    @property
    def names(self) -> list[str]:
        """A name for each free coordinate: `w[0]`, `scale`."""
        label = self.path or "theta"
        if not self.free_shape:
            return [label]
        places = [()]
        for extent in self.free_shape:
            places = [(*place, i) for place in places for i in range(extent)]
        return [f"{label}[{','.join(map(str, place))}]" for place in places]


@dataclass(frozen=True, eq=False)
class Structure:
    """How a parameter is laid out as one flat vector of unconstrained coordinates."""

    treedef: Any
    leaves: tuple[Leaf, ...]

    @staticmethod
    def of(shapes: PyTree, constraints: PyTree = None) -> "Structure":
        """The structure of a pytree of shapes; `constraints` name the leaves that are not free."""
        with_path, treedef = jax.tree_util.tree_flatten_with_path(shapes)
        wanted = by_path(constraints)
        leaves = []
        for path, leaf in with_path:
            constraint = wanted.pop(key_path_name(path), None)
            leaves.append(make_leaf(key_path_name(path), leaf.shape, constraint))
        if wanted:
            known = [leaf.path or "theta" for leaf in leaves]
            raise InputError(
                f"constraints name {sorted(wanted)}, which the parameter does not have: "
                f"its leaves are {known}"
            )
        return Structure(treedef, tuple(leaves))

    @property
    def dimension(self) -> int:
        """The number of free coordinates."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def names(self) -> list[str]:
        """A name for each free coordinate."""
        return [name for leaf in self.leaves for name in leaf.names]

    @property
    def constrained(self) -> bool:
        """Whether any leaf is not free."""
        return any(leaf.bijector is not None for leaf in self.leaves)

    def shapes(self) -> PyTree:
        """Shapes of a parameter in its own structure."""
        kind = jnp.zeros(()).dtype
        shapes = [jax.ShapeDtypeStruct(leaf.shape, kind) for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, shapes)

    def _parts(self, vector: Array) -> list[Array]:
        ends = list(itertools.accumulate(leaf.size for leaf in self.leaves))[:-1]
        pieces = jnp.split(vector, ends)
        return [p.reshape(leaf.free_shape) for p, leaf in zip(pieces, self.leaves, strict=True)]

    def unravel(self, vector: Array) -> PyTree:
        """The parameter, in the user's own structure, that a flat vector stands for."""
        values = [
            part if leaf.bijector is None else leaf.bijector(part)
            for part, leaf in zip(self._parts(vector), self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, values)

    def ravel(self, parameter: PyTree) -> Array:
        """The flat vector of a parameter."""
        values, treedef = jax.tree.flatten(parameter)
        if treedef != self.treedef:
            raise InputError(f"a parameter has the structure {self.treedef}, got {treedef}")
        kind = jnp.zeros(()).dtype
        parts = []
        for value, leaf in zip(values, self.leaves, strict=True):
            value = jnp.asarray(value, kind)
            if value.shape != leaf.shape:
                raise InputError(
                    f"{leaf.path or 'theta'} has shape {leaf.shape}, got {value.shape}"
                )
            parts.append((value if leaf.bijector is None else leaf.bijector.inv(value)).ravel())
        return jnp.concatenate(parts)

    def log_det(self, vector: Array) -> Array:
        """log |d parameter / d vector|: 0 where all coordinates are free."""
        total = jnp.zeros((), vector.dtype)
        for part, leaf in zip(self._parts(vector), self.leaves, strict=True):
            if leaf.bijector is not None:
                value = leaf.bijector(part)
                total = total + jnp.sum(leaf.bijector.log_abs_det_jacobian(part, value))
        return total

    def to_json(self) -> str:
        """The structure as text, for a saved posterior; containers of other kinds become dicts."""
        places = jax.tree.unflatten(self.treedef, range(len(self.leaves)))
        leaves = [
            {"path": leaf.path, "shape": leaf.shape, "constraint": leaf.constraint}
            for leaf in self.leaves
        ]
        return json.dumps({"tree": skeleton(places), "leaves": leaves})

    @staticmethod
    def from_json(text: str) -> "Structure":
        """The structure that `to_json` wrote."""
        stored = json.loads(text)
        leaves = []
        for leaf in stored["leaves"]:
            name, constraint = leaf["constraint"], None
            if name is not None:
                library = require("numpyro.distributions", "constraints").constraints
                constraint = getattr(library, name, None)
                if constraint is None:
                    raise InputError(
                        f"{leaf['path']} has the constraint {name}, which cannot be restored by "
                        "name: pass problem= to load"
                    )
            leaves.append(make_leaf(leaf["path"], tuple(leaf["shape"]), constraint))
        treedef = jax.tree.structure(restored(stored["tree"]))
        return Structure(treedef, tuple(leaves))


def is_constraint(value: Any) -> bool:
    """Whether a value is a NumPyro constraint (they are pytree nodes themselves)."""
    return hasattr(value, "check") and hasattr(value, "feasible_like")


def by_path(constraints: PyTree) -> dict[str, Any]:
    """Constraints by the path of the leaf they are for."""
    found: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(constraints, is_leaf=is_constraint):
        if not is_constraint(value):
            raise InputTypeError(
                f"constraints must be NumPyro constraints, such as "
                f"numpyro.distributions.constraints.positive; got {value!r}"
            )
        found[key_path_name(path)] = value
    return found


def make_leaf(path: str, shape: tuple[int, ...], constraint: Any) -> Leaf:
    """A leaf with its bijector, if it is constrained."""
    if constraint is None:
        return Leaf(path, shape, shape)
    library = require("numpyro.distributions", "constraints")
    bijector = library.biject_to(constraint)
    try:
        free_shape = tuple(bijector.inverse_shape(shape))
    except Exception as error:
        raise InputError(
            f"the constraint {constraint} does not fit {path or 'theta'} of shape {shape}: {error}"
        ) from error
    return Leaf(path, shape, free_shape, bijector, constraint_name(library, constraint))


def constraint_name(library: Any, constraint: Any) -> str:
    """The name of a constraint in NumPyro, or its text where it has arguments of its own."""
    for name, value in vars(library.constraints).items():
        if value is constraint:
            return name
    return str(constraint)


def key_path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as `a.b.0`."""
    return ".".join(jax.tree_util.keystr((key,), simple=True) for key in path)


def skeleton(tree: PyTree) -> Any:
    """A pytree of leaf numbers as JSON: [kind, children]."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, dict):
        return ["dict", {str(key): skeleton(value) for key, value in tree.items()}]
    fields = getattr(tree, "_fields", None)
    if isinstance(tree, tuple) and fields is not None:
        return ["dict", {key: skeleton(part) for key, part in zip(fields, tree, strict=True)}]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, [skeleton(value) for value in tree]]
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return ["dict", {key_path_name(path): number for path, number in paths}]


def restored(stored: Any) -> PyTree:
    """The pytree that `skeleton` wrote."""
    if isinstance(stored, int):
        return stored
    kind, children = stored
    if kind == "dict":
        return {key: restored(value) for key, value in children.items()}
    values = [restored(value) for value in children]
    return tuple(values) if kind == "tuple" else values
