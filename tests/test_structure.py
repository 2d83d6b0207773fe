"""The layout of a parameter: there and back, names, and as text."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import constraints as on

from pmd.errors import InputError, InputTypeError
from pmd.structure import Structure


class Pair(NamedTuple):
    one: Any
    two: Any


TREES = {
    "scalar": 1.5,
    "vector": np.arange(3.0),
    "dict": {"b": np.arange(6.0).reshape(2, 3), "a": 7.0},
    "nested": {"x": (1.0, [2.0, np.ones(2)]), "y": {"z": np.zeros((1, 2))}},
    "tuple": (np.ones(2), 3.0),
    "named tuple": Pair(1.0, np.array([2.0, 3.0])),
}


def structure_of(tree: Any, constraints: Any = None) -> Structure:
    return Structure.of(jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), float), tree),
                        constraints)  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_there_and_back(name: str, precision: float) -> None:
    tree = TREES[name]
    structure = structure_of(tree)
    vector = structure.ravel(tree)
    assert vector.shape == (structure.dimension,) == (len(structure.names),)
    assert not structure.constrained
    assert float(structure.log_det(vector)) == 0.0
    back = structure.unravel(vector)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    many = jax.vmap(structure.unravel)(jnp.stack([vector, 2 * vector]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], 2 * np.asarray(b)), many, tree)


def test_names_tell_the_place() -> None:
    assert structure_of(1.0).names == ["theta"]
    assert structure_of(np.ones(2)).names == ["theta[0]", "theta[1]"]
    assert structure_of(TREES["dict"]).names == [
        "a", "b[0,0]", "b[0,1]", "b[0,2]", "b[1,0]", "b[1,1]", "b[1,2]",
    ]  # fmt: skip
    assert structure_of(TREES["nested"]).names == [
        "x.0", "x.1.0", "x.1.1[0]", "x.1.1[1]", "y.z[0,0]", "y.z[0,1]",
    ]  # fmt: skip
    assert structure_of(TREES["named tuple"]).names == ["one", "two[0]", "two[1]"]


@pytest.mark.parametrize("name", ["scalar", "vector", "dict", "nested", "tuple"])
def test_text_restores_the_structure(name: str) -> None:
    structure = structure_of(TREES[name])
    again = Structure.from_json(structure.to_json())
    assert again.names == structure.names
    assert again.treedef == structure.treedef
    vector = structure.ravel(TREES[name])
    jax.tree.map(np.testing.assert_array_equal, again.unravel(vector), structure.unravel(vector))


def test_text_makes_other_containers_dicts() -> None:
    structure = structure_of(TREES["named tuple"])
    again = Structure.from_json(structure.to_json())
    assert again.names == structure.names
    assert again.unravel(jnp.arange(3.0)).keys() == {"one", "two"}


def test_text_restores_constraints() -> None:
    tree = {"scale": 2.0, "shares": np.array([0.2, 0.3, 0.5])}
    structure = structure_of(tree, {"scale": on.positive, "shares": on.simplex})
    assert structure.constrained
    assert structure.names == ["scale", "shares[0]", "shares[1]"]
    again = Structure.from_json(structure.to_json())
    vector = structure.ravel(tree)
    back = again.unravel(vector)
    np.testing.assert_allclose(back["scale"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(back["shares"], tree["shares"], rtol=1e-5)
    np.testing.assert_allclose(again.log_det(vector), structure.log_det(vector))


def test_a_constraint_with_arguments_cannot_be_restored_by_name() -> None:
    structure = structure_of(1.0, on.interval(0.0, 2.0))
    with pytest.raises(InputError, match="pass problem= to load"):
        Structure.from_json(structure.to_json())


def test_constraints_must_fit_the_parameter() -> None:
    with pytest.raises(InputError, match=r"constraints name \['sigma'\].*leaves are \['scale'\]"):
        structure_of({"scale": 1.0}, {"sigma": on.positive})
    with pytest.raises(InputTypeError, match="NumPyro constraints"):
        structure_of({"scale": 1.0}, {"scale": "positive"})
    with pytest.raises(InputError, match="does not fit scale"):
        structure_of({"scale": 1.0}, {"scale": on.simplex})


def test_a_parameter_of_another_shape_is_refused() -> None:
    structure = structure_of({"w": np.ones(3)})
    with pytest.raises(InputError, match=r"w has shape \(3,\), got \(2,\)"):
        structure.ravel({"w": np.ones(2)})
    with pytest.raises(InputError, match="structure"):
        structure.ravel([np.ones(3)])
