"""Two parameters on a grid: the true posterior, exact mirror descent, and how to score estimates.

Mirror descent without any particles is a formula: after steps with mixing fractions g_t,

    log q_t(theta)  =  log p(theta) + sum_n c_n log p(x_n | theta) + const,

where each step takes c <- (1 - g) c and then adds g N/B to the rows of its batch (the paper's
equation `solve_exact_prox`, unrolled, from the prior).  With c = 1 it is the posterior.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmd.problem import Flat, Problem
from pmd.rows import Order
from pmd.schedules import StepSize

PyTree = Any

ROWS = 50  # rows at a time: 50 values at each of 181 x 181 points are 13 MB
LOWEST = -700.0  # log-densities below this count as this: exp of it is the least float64 can hold


class Grid(NamedTuple):
    """Cell centres of a square in two dimensions."""

    axis: np.ndarray
    points: np.ndarray  # (axis x axis, 2)
    cell: float  # area

    @staticmethod
    def square(half: float, points: int) -> "Grid":
        """Equally spaced points from -half to half in both directions."""
        axis = np.linspace(-half, half, points)
        mesh = np.meshgrid(axis, axis, indexing="ij")
        return Grid(axis, np.stack(mesh, -1).reshape(-1, 2), (axis[1] - axis[0]) ** 2)

    def integral(self, density: np.ndarray) -> float:
        """Integral of a function given at the points."""
        return float(density.sum() * self.cell)


class Known(NamedTuple):
    """A normalised density on a grid, its normaliser and its entropy."""

    log_density: np.ndarray
    log_normaliser: float
    entropy: float


class Score(NamedTuple):
    """How far an estimate q is from the truth p."""

    total_variation: float  # half the integral of |p - q|
    cross_entropy: float  # - integral of p log q
    kl: float  # KL(p || q), the cross entropy less the truth's own entropy
    integral: float  # of q, over the grid


def known(grid: Grid, log_density: np.ndarray) -> Known:
    """A log-density on a grid, normalised."""
    top = log_density.max()
    log_z = float(top + np.log(grid.integral(np.exp(log_density - top))))
    log_p = log_density - log_z
    return Known(log_p, log_z, -grid.integral(np.exp(log_p) * log_p))


def score(grid: Grid, truth: Known, log_q: np.ndarray) -> Score:
    """Total variation, cross entropy and KL(truth || estimate) of an estimate on a grid.

    An estimate's normaliser is known to some four digits only.  With int q - int p added, KL does
    not fall below zero by that (as the Bregman divergence of the entropy it is the same for
    densities).
    """
    p, q = np.exp(truth.log_density), np.exp(log_q)
    cross, total = -grid.integral(p * np.maximum(log_q, LOWEST)), grid.integral(q)
    distance = grid.integral(np.abs(p - q)) / 2
    return Score(distance, cross, cross - truth.entropy + total - 1.0, total)


@partial(jax.jit, static_argnames="flat")
def block_of_rows(flat: Flat, theta: Array, rows: PyTree, weights: Array) -> Array:
    """sum_n c_n log p(x_n | theta) over a block of rows: (P, B) weights to (P, points)."""
    return weights @ flat.log_likelihood(theta, rows)


def log_iterates(problem: Problem, rows: PyTree, grid: Grid, weights: np.ndarray) -> np.ndarray:
    """The unnormalised log-density of several weightings of the rows, in float64.

    Args:
        problem: prior and likelihood of a parameter of two numbers.
        rows: the data.
        grid: where.
        weights: (P, N), the c_n of each; all ones is the posterior.

    Returns:
        (P, points).
    """
    with jax.enable_x64(True):
        flat = problem.flat()
        theta = jnp.asarray(grid.points, jnp.float64)
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), rows)
        total = np.zeros((len(weights), len(grid.points))) + np.asarray(flat.log_prior(theta))
        for first in range(0, weights.shape[1], ROWS):
            part = jax.tree.map(lambda a, n=first: a[n : n + ROWS], wide)
            chosen = jnp.asarray(weights[:, first : first + ROWS], jnp.float64)
            total += np.asarray(block_of_rows(flat, theta, part, chosen))
    return total


def row_weights(
    num_data: int,
    batch_size: int,
    step_size: StepSize,
    at: Sequence[int],
    *,
    seed: int,
    replace: bool = False,
) -> np.ndarray:
    """The c_n of mirror descent on batches of one size, along the same rows as `pmd.fit`.

    Args:
        num_data: rows there are.
        batch_size: rows a step.
        step_size: schedule of mixing fractions.
        at: rows visited, in whole batches, ascending: when to note the weights.
        seed: of the order of rows: the run's own.
        replace: whether rows are drawn with replacement.

    Returns:
        (len(at), num_data).
    """
    order = Order(num_data, seed, replace)
    passes = -(-max(at) // num_data)
    visits = np.concatenate([order.of_pass(number) for number in range(passes)])
    weights, found = np.zeros(num_data), []
    visited = step = 0
    for stop in at:
        while visited < stop:
            step += 1
            g = float(step_size(step, visited, batch_size, num_data))
            weights *= 1 - g
            np.add.at(weights, visits[visited : visited + batch_size], g * num_data / batch_size)
            visited += batch_size
        found.append(weights.copy())
    return np.array(found)
