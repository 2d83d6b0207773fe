"""Expectations from weighted particles, alone or correcting a density that was fitted to log q.

Two estimates of E[f] (design: 'Few particles, dear likelihoods'). From the particles alone,

    sum_i w_i f(theta_i),                                    w_i ∝ exp(log q_i - log p0_i),

and from many draws of the fitted density s, which the particles correct,

    E_s[f] + sum_i (w_i - v_i) f(theta_i),                   v_i ∝ s(theta_i) / p0_i.

The second is a control variate: the particles' own estimate of E_s[f] is traded for one from more
draws than there are particles. Where s is good, little noise is left; where it is poor, there is
more than before, and the first is better. The smaller estimated variance decides.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from pmd.errors import InputError, InputTypeError

PyTree = Any

# Numbers that one block of a user's function may produce at its widest place: 32 MB in float32.
WIDEST = 2**23
MOST_ROWS = 4096


class Estimate(NamedTuple):
    """An expectation, its standard error, the posterior sd of the function, and what gave them."""

    value: Any
    standard_error: Any
    sd: Any
    using: str


@dataclass(frozen=True)
class Points:
    """Particles with their weights w, and draws of a fitted density with theirs.

    Attributes:
        theta: particles, (m, d).
        w: their normalised weights.
        draws: draws of the fitted density, (n, d), or None without one.
        u: normalised weights that make them draws of what the density means.
        v: normalised weights that the density gives the particles.
        error: held-out error of the density in nats, nan where it was not measured.
    """

    theta: np.ndarray
    w: np.ndarray
    draws: np.ndarray | None = None
    u: np.ndarray | None = None
    v: np.ndarray | None = None
    error: float = np.nan


def importance(log_w: np.ndarray) -> np.ndarray:
    """Normalised weights in float64; zero where the log-weight is -inf."""
    w = np.exp(log_w - log_w.max())
    return w / w.sum()


def sums(blocks: Iterable[np.ndarray], columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """columns.T @ F and columns.T @ F^2 for a matrix F that comes in blocks of rows."""
    first = second = np.zeros(())
    start = 0
    with np.errstate(invalid="ignore", over="ignore"):
        for block in blocks:
            part = columns[start : start + len(block)]
            start += len(block)
            # A particle of no weight may have any value, infinite ones among them.
            block = np.where(np.any(part != 0, axis=1, keepdims=True), block, 0.0)
            first = first + part.T @ block
            second = second + part.T @ (block * block)
    return first, second


def combine(
    particles: Iterable[np.ndarray],
    draws: Callable[[], Iterable[np.ndarray]],
    points: Points,
    using: str | None,
) -> Estimate:
    """The better of the two estimates for a vector-valued function, or the one asked for.

    Args:
        particles: values at the particles in blocks of rows, less some reference.
        draws: gives the same at the draws of the density, if it comes to that.
        points: weights.
        using: "particles", "density", or None for the one with the smaller estimated variance, as
            a share of the particles' and on average over the outputs.
    """
    w = points.w
    delta = np.zeros_like(w) if points.v is None else w - points.v
    v = w - delta
    columns = np.stack([w, delta, w * w, delta * delta, delta * v], 1)
    first, second = sums(particles, columns)
    mean, shift = first[0], first[1]
    noise = second[2] - 2 * mean * first[2] + mean**2 * (w @ w)
    alone = Estimate(mean, root(noise), root(second[0] - mean**2), "particles")
    if points.u is None or using == "particles" or (using is None and np.isnan(points.error)):
        return alone

    # The particles' part is the sum of w (f - E_w f) - v (f - E_v f)
    #                              = delta (f - E_w f) - v (E_w f - E_v f).
    centred = second[3] - 2 * mean * first[3] + mean**2 * (delta @ delta)
    crossed = first[4] - mean * (delta @ v)
    corrected = centred - 2 * shift * crossed + shift**2 * (v @ v)
    # At the particles that it was fitted to, a density looks better than it is: its held-out
    # error e leaves at least e^2 of the particles' own variance.
    corrected = np.maximum(corrected, min(1.0, np.nan_to_num(points.error)) ** 2 * noise)
    drawn, square = sums(draws(), np.stack([points.u, points.u**2], 1))
    with np.errstate(invalid="ignore"):
        spread = square[1] - 2 * drawn[0] * drawn[1] + drawn[0] ** 2 * (points.u @ points.u)
        value = drawn[0] + shift
        sd = root(square[0] + second[1] - value**2)
    both = Estimate(value, root(corrected + spread), sd, "density")
    return both if using == "density" or better(both, alone) else alone


def better(both: Estimate, alone: Estimate) -> bool:
    """Whether the corrected density has the smaller variance, on average over the outputs."""
    varies = alone.standard_error > 0
    with np.errstate(invalid="ignore"):
        ratio = (both.standard_error[varies] / alone.standard_error[varies]) ** 2
    sound = np.isfinite(both.value).all() and (both.sd[varies] > 0).all()
    return bool(sound and (not len(ratio) or ratio.mean() < 1))


def root(variance: np.ndarray) -> np.ndarray:
    """Square root of a variance that rounding may have made negative."""
    return np.sqrt(np.maximum(variance, 0.0))


def expectation(
    f: Callable[[PyTree], PyTree],
    unravel: Callable[[jax.Array], PyTree],
    points: Points,
    using: str | None = None,
) -> Estimate:
    """E[f(theta)], where f is a traceable function of one parameter.

    f runs in JAX's current default precision, its values are averaged in float64.

    Returns:
        an `Estimate` whose value, standard error and sd have f's own structure.
    """
    return average(Function(f, unravel, points.theta), points, using)


def average(function: "Function", points: Points, using: str | None, *extra: PyTree) -> Estimate:
    """The expectation of a function, given what it takes beside the parameter."""
    values = function.blocks(points.theta, *extra)
    first = next(values)
    # Sums of squares are taken about a value in the middle of things, to keep their digits.
    reference = first[np.argmax(points.w[: len(first)])]
    reference = np.where(np.isfinite(reference), reference, 0.0)

    def less(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        return (block - reference for block in blocks)

    found = combine(
        less(chain([first], values)),
        lambda: less(function.blocks(drawn(points), *extra)),
        points,
        using,
    )
    parts = (found.value + reference, found.standard_error, found.sd)
    value, error, sd = map(function.restore, parts)
    return Estimate(value, error, sd, found.using)


def moments(
    particles: np.ndarray, draws: Callable[[], np.ndarray], points: Points, using: str | None
) -> Estimate:
    """Means and sds of plain numbers, (m, D) at the particles and (n, D) at the draws.

    The choice between the two estimates looks at the errors of first and second moments.
    """
    w = points.w
    mean = w @ particles
    scale = np.sqrt(w @ (particles - mean) ** 2)
    scale = np.where(scale > 0, scale, 1.0)

    def standard(x: np.ndarray) -> Iterator[np.ndarray]:
        z = (x - mean) / scale
        yield np.concatenate([z, z * z - 1], axis=1)

    found = combine(standard(particles), lambda: standard(draws()), points, using)
    value, error, sd = (part[: len(mean)] * scale for part in found[:3])
    return Estimate(value + mean, error, sd, found.using)


def prediction(
    f: Callable[[PyTree, PyTree], PyTree],
    rows: PyTree,
    unravel: Callable[[jax.Array], PyTree],
    points: Points,
    using: str | None = None,
) -> Estimate:
    """E[f(theta, row)] for every row, in chunks of rows."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
    lengths = {leaf.shape[:1] for leaf in leaves}
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        found = [leaf.shape for leaf in leaves]
        raise InputError(f"rows must be arrays with the same, non-empty leading axis, got {found}")
    total = len(leaves[0])
    size = min(total, MOST_ROWS)

    def rows_from(start: int) -> PyTree:
        chosen = np.minimum(np.arange(start, start + size), total - 1)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[chosen], rows)

    function = Function(jax.vmap(f, (None, 0)), unravel, points.theta, rows_from(0))
    chunks = []
    for start in range(0, total, size):
        each = average(function, points, using, rows_from(start))
        keep = min(size, total - start)
        chunks.append(jax.tree.map(lambda leaf, keep=keep: leaf[:keep], each[:3]))
        using = each.using
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)
    value, error, sd = joined
    return Estimate(value, error, sd, using or "particles")


def drawn(points: Points) -> np.ndarray:
    """The draws of a density that is known to be there."""
    assert points.draws is not None
    return points.draws


class Function:
    """A user's function of one parameter, evaluated at many flat vectors in blocks of rows."""

    def __init__(
        self,
        f: Callable[..., PyTree],
        unravel: Callable[[jax.Array], PyTree],
        theta: np.ndarray,
        *extra: PyTree,
    ):
        def flat(vector: jax.Array, *extra: PyTree) -> jax.Array:
            return ravel_pytree(f(unravel(vector), *extra))[0]

        def whole(vector: jax.Array, *extra: PyTree) -> PyTree:
            return jax.tree.map(jnp.asarray, f(unravel(vector), *extra))

        one = jax.ShapeDtypeStruct(theta.shape[1:], jnp.zeros(()).dtype)
        jaxpr, self.shape = jax.make_jaxpr(whole, return_shape=True)(one, *extra)
        leaves = jax.tree.leaves(self.shape)
        if not leaves or any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
            raise InputTypeError(
                f"the function must return real numbers or arrays of them; it returned {self.shape}"
            )
        # One block size, and so one compilation: as many rows as fit, and no more than are there.
        fit = min(WIDEST // min(widest(jaxpr.jaxpr), WIDEST), MOST_ROWS, 2 * len(theta) - 1)
        self.rows = 2 ** (fit.bit_length() - 1)
        self.compiled = jax.jit(lambda t, extra: jax.vmap(lambda v: flat(v, *extra))(t))

    def blocks(self, theta: np.ndarray, *extra: PyTree) -> Iterator[np.ndarray]:
        """Values at (n, d) vectors, (n, outputs) in float64, by blocks of one number of rows."""
        for start in range(0, len(theta), self.rows):
            part = theta[start : start + self.rows]
            padded = np.concatenate([part, np.repeat(part[-1:], self.rows - len(part), 0)])
            values = self.compiled(jnp.asarray(padded), extra)
            yield np.asarray(values, dtype=float)[: len(part)]

    def restore(self, flat: np.ndarray) -> PyTree:
        """A flat vector of outputs in the function's own structure."""
        leaves, treedef = jax.tree.flatten(self.shape)
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        pieces = np.split(flat, ends)
        values = [p.reshape(leaf.shape)[()] for p, leaf in zip(pieces, leaves, strict=True)]
        return jax.tree.unflatten(treedef, values)


def widest(jaxpr: Any) -> int:
    """Numbers in the largest array that a program makes, functions called in it included."""
    largest = 1
    for equation in jaxpr.eqns:
        largest = max(largest, *(getattr(out.aval, "size", 1) for out in equation.outvars), 1)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                largest = max(largest, widest(getattr(inner, "jaxpr", inner)))
    return largest


def is_program(value: Any) -> bool:
    """Whether a parameter of an equation is a program of its own."""
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def quantiles(x: np.ndarray, weights: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Quantiles of every column of x under one set of weights, (len(q), columns).

    Linear between the points, each in the middle of its own weight (NumPy's "hazen" for equal
    weights). Weights may be negative here and there: the distribution function is made monotone.
    """
    live = weights != 0
    x, weights = x[live], weights[live]
    found = np.empty((len(q), x.shape[1]))
    for j, column in enumerate(x.T):
        order = np.argsort(column, kind="stable")
        w = weights[order]
        rising = np.maximum.accumulate(np.cumsum(w) - 0.5 * w)
        found[:, j] = np.interp(q, rising, column[order])
    return found


def systematic(w: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """n indices drawn by systematic resampling, in random order."""
    places = (np.arange(n) + rng.random()) / n
    chosen = np.searchsorted(np.cumsum(w), places)
    return rng.permutation(np.minimum(chosen, np.flatnonzero(w)[-1]))
