"""A problem: a prior, a likelihood of one row, and the library's view of both."""

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pmd.errors import InputError, InputTypeError
from pmd.structure import Structure, key_path_name

PyTree = Any


class Problem:
    """A prior on one parameter and the likelihood of one row of data.

    Parameters are any pytree of floating-point arrays.  The functions are written for one
    parameter (and one row); the library vectorises them.

    Args:
        log_prior: log-density of one parameter; normalised, or the evidence is off by its constant.
        log_likelihood: log-likelihood of one row of data given one parameter: `f(theta, row)`.
        sample_prior: one parameter from the prior, given a JAX random key.
        log_likelihood_batch: instead of `log_likelihood`, `f(theta, rows)` for one parameter and a
            batch of rows (leaves with a leading axis), returning one value a row.
        constraints: for parameters that are not free: NumPyro constraints, in the parameter's own
            structure (leaves that are left out are free).  Densities are meant on the constrained
            space; the Jacobian is the library's business.
        start: `(sample, log_density)` of a density to start from instead of the prior, for priors
            that are vague or improper.  The posterior does not depend on it.

    Example:
        >>> import jax, jax.numpy as jnp, pmd
        >>> problem = pmd.Problem(
        ...     log_prior=lambda theta: jax.scipy.stats.norm.logpdf(theta),
        ...     log_likelihood=lambda theta, row: jax.scipy.stats.norm.logpdf(row, theta),
        ...     sample_prior=lambda key: jax.random.normal(key),
        ... )
    """

    def __init__(
        self,
        log_prior: Callable[[PyTree], Any],
        log_likelihood: Callable[[PyTree, PyTree], Any] | None = None,
        sample_prior: Callable[[Array], PyTree] | None = None,
        *,
        log_likelihood_batch: Callable[[PyTree, PyTree], Any] | None = None,
        constraints: PyTree = None,
        start: tuple[Callable[[Array], PyTree], Callable[[PyTree], Any]] | None = None,
    ):
        given = {"log_prior": log_prior, "sample_prior": sample_prior}
        if (log_likelihood is None) == (log_likelihood_batch is None):
            raise InputError(
                "give exactly one of log_likelihood (one row) and log_likelihood_batch (many rows)"
            )
        given["log_likelihood"] = log_likelihood or log_likelihood_batch
        for name, function in given.items():
            if not callable(function):
                raise InputTypeError(f"{name} must be a function, got {function!r}")
        if start is not None and not (
            isinstance(start, tuple) and len(start) == 2 and all(map(callable, start))
        ):
            raise InputTypeError(
                f"start must be two functions, (sample(key), log_density(theta)), got {start!r}"
            )
        self.log_prior = log_prior
        self.log_likelihood = log_likelihood
        self.log_likelihood_batch = log_likelihood_batch
        self.sample_prior: Callable[[Array], PyTree] = given["sample_prior"]  # type checked above
        self.constraints = constraints
        self.start = start
        self._flat: dict[Hashable, Flat] = {}

    def flat(self) -> "Flat":
        """The problem over flat vectors, under JAX's current default precision."""
        wide = jnp.zeros(()).dtype
        if wide not in self._flat:
            self._flat[wide] = Flat(self)
        return self._flat[wide]


class Flat:
    """A problem over arrays of flat, unconstrained vectors: what the recursion works on.

    All densities are with respect to the flat coordinates: with constraints, the user's density
    times the Jacobian.  Instances are compared by identity, so that they can be static arguments
    of compiled functions.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.structure = Structure.of(draw_shape(problem.sample_prior), problem.constraints)
        self.dimension = self.structure.dimension
        if problem.start is not None:
            other = Structure.of(draw_shape(problem.start[0], "start"), problem.constraints)
            if other.names != self.structure.names:
                raise InputError(
                    f"start draws parameters {other.names}, sample_prior draws "
                    f"{self.structure.names}: both must have the same structure"
                )
        for name, density in (("log_prior", problem.log_prior), *self._start_density()):
            check_scalar(name, density, self.structure.shapes())

    def _start_density(self) -> tuple[tuple[str, Callable[[PyTree], Any]], ...]:
        return () if self.problem.start is None else (("start", self.problem.start[1]),)

    @cached_property
    def log_prior(self) -> Callable[[Array], Array]:
        """Log prior density of many vectors, (m, d) -> (m,), compiled."""
        return jax.jit(jax.vmap(lambda v: self._density(self.problem.log_prior, v)))

    @cached_property
    def log_start(self) -> Callable[[Array], Array]:
        """Log-density of the start (the prior unless `start=` was given), (m, d) -> (m,)."""
        if self.problem.start is None:
            return self.log_prior
        density = self.problem.start[1]
        return jax.jit(jax.vmap(lambda v: self._density(density, v)))

    @cached_property
    def sample(self) -> Callable[[Array, Array], Array]:
        """Draws of the start by number: (key, (m,) integers) -> (m, d), i-th by i alone."""
        sampler = self.problem.start[0] if self.problem.start else self.problem.sample_prior

        def one(key: Array, i: Array) -> Array:
            return self.structure.ravel(sampler(jax.random.fold_in(key, i)))

        return jax.jit(jax.vmap(one, (None, 0)))

    def log_likelihood(self, theta: Array, rows: PyTree) -> Array:
        """Log-likelihood of every row under every vector: (m, d) and B rows -> (B, m).

        Rows are the outer and particles the inner axis of the vectorisation, so that `x @ theta`
        in the user's function becomes one product of the matrices of rows and particles.
        """
        by_row = self.problem.log_likelihood
        if by_row is not None:

            def one(row: PyTree, vector: Array) -> Array:
                return jnp.asarray(by_row(self.structure.unravel(vector), row), vector.dtype)

            return jax.vmap(lambda row: jax.vmap(lambda v: one(row, v))(theta))(rows)
        by_batch = self.problem.log_likelihood_batch
        assert by_batch is not None
        values = jax.vmap(lambda v: by_batch(self.structure.unravel(v), rows), out_axes=1)(theta)
        return jnp.asarray(values, theta.dtype)

    def _density(self, density: Callable[[PyTree], Any], vector: Array) -> Array:
        value = density(self.structure.unravel(vector))
        return jnp.asarray(value, vector.dtype) + self.structure.log_det(vector)

    def check_likelihood(self, rows: PyTree) -> None:
        """Trace the likelihood on the shapes of `rows` and say what is wrong with its value."""
        shapes = self.structure.shapes()
        if self.problem.log_likelihood is not None:
            row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), rows)
            check_scalar("log_likelihood", self.problem.log_likelihood, shapes, row)
            return
        size = 3
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype), rows)
        value = traced("log_likelihood_batch", self.problem.log_likelihood_batch, shapes, batch)
        wanted = f"one value a row, shape ({size},) here"
        check_value("log_likelihood_batch", value, (size,), wanted)


def draw_shape(sampler: Callable[[Array], PyTree], name: str = "sample_prior") -> PyTree:
    """Shapes and types of what a sampler returns, found without drawing."""
    try:
        shapes = jax.eval_shape(sampler, jax.random.key(0))
    except Exception as error:
        raise InputError(f"{name} could not be called with a random key: {error}") from error
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    if not leaves:
        raise InputError(f"{name} returned no parameter at all: {shapes!r}")
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            where = key_path_name(path) or "the parameter"
            raise InputTypeError(
                f"{name} returned {leaf.dtype} numbers for {where}: parameters must be real "
                "floating-point numbers"
            )
    return shapes


def traced(name: str, function: Any, *shapes: PyTree) -> Any:
    """The shape of what a user's function returns; its failure becomes an error that names it."""
    try:
        return jax.eval_shape(function, *shapes)
    except Exception as error:
        told = ", ".join(str(describe(shape)) for shape in shapes)
        raise InputError(
            f"{name} failed on arguments of shapes {told} (as drawn by sample_prior): "
            f"{type(error).__name__}: {error}"
        ) from error


def check_scalar(name: str, function: Any, *shapes: PyTree) -> None:
    """A user's log-density must return one real number."""
    check_value(name, traced(name, function, *shapes), (), "one number for one parameter")


def check_value(name: str, value: Any, shape: tuple[int, ...], wanted: str) -> None:
    """Shape and type of what a user's function returned."""
    if jax.tree.structure(value) != jax.tree.structure(0.0):
        raise InputTypeError(f"{name} must return {wanted}, got {value!r}")
    if value.shape != shape:
        raise InputError(
            f"{name} must return {wanted}, got an array of shape {value.shape}: sum over its axes"
        )
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise InputTypeError(f"{name} returned a complex number; log-densities are real")


def describe(shapes: PyTree) -> PyTree:
    """A pytree of shapes as text."""
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", shapes)
