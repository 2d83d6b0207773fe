"""A NaN in the middle of a run: which step, which rows, which particle."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pmd.errors import NotFiniteError

if TYPE_CHECKING:
    from pmd.run import Run

PyTree = Any


def find_bad(flat: Any, theta: np.ndarray, rows: PyTree, block: int = 256) -> tuple[int, int]:
    """The first (row, particle) whose log-likelihood is NaN or +inf; (-1, -1) if there is none."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    for first in range(0, num_rows, block):
        part = jax.tree.map(lambda a, i=first: a[i : i + block], rows)
        for start in range(0, len(theta), block):
            points = jnp.asarray(theta[start : start + block])
            values = np.asarray(flat.log_likelihood(points, part))
            wrong = np.argwhere(np.isnan(values) | np.isposinf(values))
            if len(wrong):
                return first + int(wrong[0, 0]), start + int(wrong[0, 1])
    return -1, -1


def not_finite(run: "Run", index: np.ndarray, rows: PyTree = None) -> NotFiniteError:
    """The error for a step on rows `index` that met NaN or +inf; the state is the last good one.

    `rows` are the rows themselves where they are not the run's.
    """
    theta = np.asarray(run.state.theta)[: int(run.state.count)]
    where = f"step {int(run.state.t) + 1}, a batch of {len(index)} rows ({preview(index)})"
    return found(run, theta, np.asarray(index), rows, where)


def move_not_finite(run: "Run", culprit: np.ndarray) -> NotFiniteError:
    """The error for a move that met NaN or +inf at a vector; the state is that before the move."""
    index = np.flatnonzero(np.asarray(run.state.row_weights) > 0)
    where = f"a move after step {int(run.state.t)}, on the {len(index)} rows seen by then"
    return found(run, culprit[None], index, None, where)


def found(
    run: "Run", theta: np.ndarray, index: np.ndarray, rows: PyTree, where: str
) -> NotFiniteError:
    """Which row and which particle it was, and what to do."""
    if rows is None:
        rows = jax.tree.map(lambda a: a[jnp.asarray(index)], run.rows)
    row, particle = find_bad(run.flat, theta, rows)
    name, told = "log_likelihood", ""
    if row >= 0:
        value = jax.tree.map(lambda a: np.asarray(a)[row], rows)
        told = f": row {int(index[row])}, {value}"
    else:
        prior = np.asarray(run.flat.log_prior(jnp.asarray(theta)))
        bad = ~(prior < np.inf)
        if not bad.any():
            return NotFiniteError(
                f"every particle lost its weight at {where}: log_likelihood is -inf for all of "
                "them; check that the prior covers what the data ask for"
            )
        name, particle = "log_prior", int(np.argmax(bad))
    values = jax.tree.map(np.asarray, run.flat.structure.unravel(jnp.asarray(theta[particle])))
    return NotFiniteError(
        f"{name} is NaN or +inf at {where}{told}, under the parameter {values}; return -inf where "
        "a parameter is impossible, and guard logarithms and divisions. The error's .posterior is "
        "the last good state"
    )


def preview(index: np.ndarray) -> str:
    """The first few of many row numbers."""
    told = ", ".join(str(int(i)) for i in index[:5])
    return told + (", ..." if len(index) > 5 else "")
