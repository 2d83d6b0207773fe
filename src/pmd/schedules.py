"""Step sizes, batch sizes and particle numbers as functions of how far a run has come.

Step sizes are *mixing fractions* g in (0, 1], the paper's gamma_t of section 2.  Its appendix F
writes gamma_t for N g: divide by the number of rows to get the unit used here.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

StepSize = Callable[[Any, Any, Any, Any], Any]
"""(step t = 1, 2, ..., rows visited, batch size, rows in the data) -> mixing fraction."""

Growth = Callable[[float, float], float]
"""(share of the planned passes done, rows in the data) -> batch size or number of particles."""


def rows_visited(c: float = 2.0) -> StepSize:
    """g = c B / (n + c N), n the rows visited: the default, at fixed B the same as c / (t + c N/B).

    In the first pass g is about B/N, so that each batch enters once with its own likelihood, and
    the start is forgotten like n^-c.

    Example:
        >>> import pmd
        >>> float(pmd.schedules.rows_visited(2.0)(1, 0, 10, 1000))
        0.01
    """

    def schedule(t: Any, visited: Any, batch_size: Any, num_data: Any) -> Any:
        del t
        return c * batch_size / (visited + c * num_data)

    return schedule


def power(eta: float = 1.0, offset: float = 1.0, kappa: float = 1.0) -> StepSize:
    """g = eta / (offset + t^kappa), at most 1: the paper's eta / t and 1 / (100 + sqrt t)."""

    def schedule(t: Any, visited: Any, batch_size: Any, num_data: Any) -> Any:
        del visited, batch_size, num_data
        return jnp.minimum(eta / (offset + jnp.asarray(t, float) ** kappa), 1.0)

    return schedule


def inverse_sqrt(offset: float = 100.0) -> StepSize:
    """g = 1 / (offset + sqrt t): the paper's logistic regression."""
    return power(1.0, offset, 0.5)


def constant(g: float) -> StepSize:
    """The same mixing fraction at every step."""

    def schedule(t: Any, visited: Any, batch_size: Any, num_data: Any) -> Any:
        del t, visited, batch_size, num_data
        return g

    return schedule


def kl_theorem(
    delta_over_m: float, beta: float, dimension: int, num_particles: Callable[[Any], Any]
) -> StepSize:
    """g = min { 2 / (t + 1), Delta / (M m_t^(beta / (d + 2 beta))) }: theorem 'KL-divergence'.

    Args:
        delta_over_m: Delta / M, of the theorem's constants.
        beta: smoothness of prior and likelihood.
        dimension: number of parameters d.
        num_particles: m_t as a function of t.
    """

    def schedule(t: Any, visited: Any, batch_size: Any, num_data: Any) -> Any:
        del visited, batch_size, num_data
        rate = num_particles(t) ** (beta / (dimension + 2 * beta))
        return jnp.minimum(2.0 / (t + 1), delta_over_m / rate)

    return schedule


def geometric(first: float, last: float | None = None) -> Growth:
    """From `first` to `last` (all rows, if not given) by equal factors over the planned passes."""

    def growth(done: float, num_data: float) -> float:
        end = num_data if last is None else last
        return first * (end / first) ** min(done, 1.0)

    return growth


def linear(first: float, last: float | None = None) -> Growth:
    """From `first` to `last` (all rows, if not given) by equal differences."""

    def growth(done: float, num_data: float) -> float:
        end = num_data if last is None else last
        return first + (end - first) * min(done, 1.0)

    return growth
