"""Layouts of parameters and rows, and plans, of any shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pmd.likelihood import Blocks
from pmd.plan import make_plan
from pmd.rows import Order, as_rows
from pmd.structure import Structure

shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
leaves = shapes.map(lambda shape: np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.text("abcxyz", min_size=1, max_size=3), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=5,
)


@given(trees)
@settings(max_examples=60)
def test_any_parameter_goes_there_and_back(tree: Any) -> None:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), tree)
    structure = Structure.of(shapes)
    vector = structure.ravel(tree)
    assert vector.shape == (structure.dimension,)
    assert len(structure.names) == len(set(structure.names)) == structure.dimension
    for layout in (structure, Structure.from_json(structure.to_json())):
        back = layout.unravel(vector)
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, back, tree)


@given(trees, st.integers(1, 7))
@settings(max_examples=30)
def test_any_table_has_as_many_rows_as_its_arrays(tree: Any, number: int) -> None:
    data = jax.tree.map(lambda a: np.broadcast_to(a, (number, *a.shape)), tree)
    rows, found = as_rows(data)
    assert found == number
    jax.tree.map(np.testing.assert_array_equal, rows, data)


@given(
    num_data=st.integers(1, 500),
    passes=st.floats(0.3, 12),
    batch=st.one_of(st.none(), st.integers(1, 500)),
    full=st.one_of(st.none(), st.integers(0, 3)),
    chunk=st.integers(1, 50),
)
@settings(max_examples=60)
def test_any_plan_visits_what_it_says(
    num_data: int, passes: float, batch: int | None, full: int | None, chunk: int
) -> None:
    plan = make_plan(
        num_data, 2, num_particles=None, passes=passes,
        batch_size=None if batch is None else min(batch, num_data),
        full_passes=full if full is None or full <= passes else 0, step_size=None, density=None,
        rejuvenate=None, exact=None, replace=False, evaluations=None, seconds=None,
    )  # fmt: skip
    visited = steps = 0
    left = 1.0
    while visited < plan.budget:
        size, g = plan.steps(visited, steps, chunk)
        assert ((size >= 1) & (size <= num_data)).all()
        assert ((g > 0) & (g <= 1)).all()
        visited, steps = visited + int(size.sum()), steps + len(size)
        left *= float(np.prod(1 - g))
    assert visited == plan.budget == max(0, round(passes * num_data) - plan.full_passes * num_data)
    if plan.budget >= num_data:
        assert left < 0.5  # the start is forgotten like (1 + n / (2 N))^-2, .44 after a pass


@given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.integers(0, 200))
@settings(max_examples=40)
def test_any_window_is_where_its_rows_are(num_data: int, seed: int, position: int) -> None:
    order = Order(num_data, seed, replace=False)
    shown, start = order.window(position)
    number, at = divmod(position, num_data)
    assert start == at
    assert sorted(np.asarray(shown)[:num_data]) == list(range(num_data))
    np.testing.assert_array_equal(np.asarray(shown)[num_data:], order.of_pass(number + 1))


@given(st.integers(1, 10**5), st.integers(1, 10**7), st.integers(1, 10**7))
def test_any_blocks_hold_the_particles(particles: int, batch: int, num_data: int) -> None:
    blocks = Blocks.choose(particles, min(batch, num_data), num_data)
    assert blocks.particles >= 1
    assert blocks.rows >= 1
    capacity = blocks.capacity(particles)
    assert capacity >= particles
    assert capacity % blocks.particles == 0
    assert capacity < particles + blocks.particles
