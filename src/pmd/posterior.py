"""What a user gets back: weighted particles, a normalised density, and how far to trust them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from pmd.certificate import Certificate
from pmd.cloud import DRAWS, Cloud
from pmd.errors import InputError, InputTypeError, require
from pmd.estimates import Estimate, expectation, prediction, systematic
from pmd.parameters import Parameters
from pmd.seeds import check_seed, seed_to_key
from pmd.structure import Structure

if TYPE_CHECKING:
    from pmd.modes import Mode
    from pmd.problem import Problem

PyTree = Any


class Posterior:
    """A posterior: weighted particles, a density fitted to them, evidence and certificate.

    Means, sds, quantiles and other expectations come from the particles alone or from many draws
    of the fitted density corrected by the particles, whichever has the smaller estimated variance;
    `using="particles"` or `using="density"` decides otherwise.

    Args:
        structure: between a parameter as the user writes it and flat vectors.
        theta: particles, flat and unconstrained, (m, d).
        log_q: log-density reached at the particles, up to a constant; -inf for zero weight.
        log_p0: log-density the particles were drawn from, up to a constant.
        density: fitted density, None where there is none.
        log_evidence, log_evidence_error: log of the integral of prior times likelihood, and the
            standard error of it.
        certificate: how far to trust the result.
        history: one record a step and a move.
        evaluations: likelihood evaluations, particles times rows over N.
        settings: how the run was made; its `plan` is printed.
        problem: needed to certify and to update.
        atoms: the particles carry the posterior alone (the paper's strategy 1): no density.

    Attributes:
        particles: in the parameter's own structure, with a leading axis.
        log_weights: their normalised log-weights.
        names: one name for each number of a parameter, in the order of `cov`.

    Example:
        >>> import jax, numpy as np, pmd
        >>> from jax.scipy.stats import norm
        >>> problem = pmd.Problem(
        ...     log_prior=lambda theta: norm.logpdf(theta),
        ...     log_likelihood=lambda theta, row: norm.logpdf(row, theta),
        ...     sample_prior=lambda key: jax.random.normal(key),
        ... )
        >>> x = np.random.default_rng(0).normal(0.7, 1.0, 200).astype("float32")
        >>> posterior = pmd.fit(problem, x, num_particles=200, passes=3, progress=False)
        >>> exact = x.sum() / 201  # the posterior is N(exact, 1 / 201)
        >>> bool(abs(posterior.mean() - exact) < 0.05 * posterior.std())
        True
        >>> round(float(posterior.log_prob(exact) - norm.logpdf(0, 0, 201**-0.5)), 2) == 0
        True
        >>> posterior.sample(1000, seed=1).shape, posterior.quantile([0.05, 0.95]).shape
        ((1000,), (2,))
        >>> posterior.certificate.verdict
        'trust'
    """

    def __init__(
        self,
        *,
        structure: Structure,
        theta: ArrayLike,
        log_q: ArrayLike,
        log_p0: ArrayLike,
        density: Any,
        log_evidence: float,
        log_evidence_error: float,
        certificate: Certificate,
        history: Sequence[dict[str, Any]] = (),
        evaluations: float = 0.0,
        settings: dict[str, Any] | None = None,
        problem: "Problem | None" = None,
        atoms: bool = False,
    ):
        self.structure = structure
        self.theta = np.asarray(theta, float)
        self.log_q = np.asarray(log_q, float)
        self.log_p0 = np.asarray(log_p0, float)
        self.density = density
        self.log_evidence = float(log_evidence)
        self.log_evidence_error = float(log_evidence_error)
        self.certificate = certificate
        self.history = list(history)
        self.evaluations = float(evaluations)
        self.settings = dict(settings or {})
        self.problem = problem
        self.atoms = atoms
        log_w = self.log_q - self.log_p0
        if not np.isfinite(log_w.max(initial=-np.inf)):
            raise InputError("a posterior needs finite log-weights: log_q - log_p0 has none")
        log_w -= log_w.max()
        self.log_weights = log_w - np.log(np.exp(log_w).sum())
        self.cloud = Cloud(
            Parameters(structure), self.theta, self.log_p0, self.log_weights,
            None if atoms else density,
        )  # fmt: skip

    # ------------------------------------------------------------------ what there is

    @property
    def names(self) -> list[str]:
        """A name for each number of a parameter: "w[0]", "scale"."""
        return self.cloud.parameters.names

    @property
    def num_particles(self) -> int:
        """How many particles there are."""
        return len(self.theta)

    @property
    def ess(self) -> float:
        """Effective number of particles, 1 / sum w_i^2."""
        return float(1 / np.exp(2 * self.log_weights).sum())

    @cached_property
    def particles(self) -> PyTree:
        """The particles in the parameter's own structure, with a leading axis."""
        return self.cloud.parameters.tree(self.cloud.plain)

    @property
    def using(self) -> str:
        """Which estimate means, sds and quantiles come from: "particles" or "density"."""
        return self.cloud.moments().using

    # ------------------------------------------------------------------ estimates

    def mean(self, *, using: str | None = None) -> PyTree:
        """Posterior mean, in the parameter's own structure."""
        return self.cloud.parameters.tree(self.cloud.moments(using).value)

    def std(self, *, using: str | None = None) -> PyTree:
        """Posterior standard deviation, in the parameter's own structure."""
        return self.cloud.parameters.tree(self.cloud.moments(using).sd)

    def cov(self, *, using: str | None = None) -> np.ndarray:
        """Posterior covariance of all numbers of a parameter, in the order of `names`."""
        x, _, weights = self.cloud.measure(using)
        centred = x - self.cloud.moments(using).value
        return (centred * weights[:, None]).T @ centred

    def quantile(self, q: ArrayLike, *, using: str | None = None) -> PyTree:
        """Posterior quantiles of every number of a parameter.

        Args:
            q: one probability, or several: then the result has a leading axis.
            using: see the class.
        """
        levels = probabilities("q", q)
        found = self.cloud.quantiles(np.atleast_1d(levels).ravel(), using)
        return self.cloud.parameters.tree(found.reshape(*levels.shape, -1))

    def hdi(self, prob: float = 0.94, *, using: str | None = None) -> PyTree:
        """The shortest interval of probability `prob`: leading axis (lower, upper)."""
        level = probabilities("prob", prob)
        if level.ndim or not 0 < level < 1:
            raise InputError(f"prob must be one number between 0 and 1, such as 0.94; got {prob}")
        lower = np.linspace(0, 1 - level, 501)
        ends = self.cloud.quantiles(np.concatenate([lower, lower + level]), using)
        ends = ends.reshape(2, len(lower), -1)
        best = np.argmin(ends[1] - ends[0], axis=0)
        return self.cloud.parameters.tree(np.take_along_axis(ends, best[None, None], 1)[:, 0])

    def expect(
        self,
        f: Callable[[PyTree], PyTree],
        *,
        using: str | None = None,
        standard_error: bool = False,
    ) -> Any:
        """Posterior expectation of a function of one parameter.

        Args:
            f: traceable by JAX; from a parameter to a number, an array or a pytree of arrays.
            using: see the class.
            standard_error: return an `Estimate`: value, standard error, the posterior sd of the
                function, and which of the two estimates was used.

        Returns:
            an array (or pytree) of the shape of f's values.
        """
        found = expectation(f, self.structure.unravel, self.cloud.points(using), using)
        return found if standard_error else found.value

    def predict(
        self, f: Callable[[PyTree, PyTree], PyTree], rows: PyTree, *, using: str | None = None
    ) -> Estimate:
        """Posterior predictive: mean and sd of a function of parameter and row, for every row.

        Args:
            f: `f(theta, row)`, traceable by JAX.
            rows: arrays with a leading axis, as `fit` takes them.
            using: see the class.

        Returns:
            an `Estimate` whose arrays have the rows as their leading axis.
        """
        return prediction(f, rows, self.structure.unravel, self.cloud.points(using), using)

    # ------------------------------------------------------------------ draws and density

    def sample(self, n: int, seed: int = 0) -> PyTree:
        """n draws of equal weight, in the parameter's own structure, with a leading axis.

        Up to the effective number of particles these are particles, by systematic resampling; for
        more, they are draws of the fitted density, resampled by their weights, where a density
        with a known error is there.
        """
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise InputTypeError(f"n must be a whole number of draws, got {n!r}")
        if n < 0:
            raise InputError(f"n must not be negative, got {n}")
        rng = np.random.default_rng(check_seed(seed))
        if n <= self.ess or self.cloud.moments().using == "particles":
            chosen = systematic(np.exp(self.log_weights), n, rng)
            return self.cloud.parameters.tree(self.cloud.plain[chosen])
        theta, weights = self.cloud.draw(seed_to_key(seed), max(2 * n, DRAWS))
        free = theta[systematic(weights, n, rng)]
        return self.cloud.parameters.tree(self.cloud.parameters.constrain(free))

    def log_prob(self, theta: PyTree) -> Any:
        """Normalised log-density in the user's parametrisation.

        Args:
            theta: one parameter, or a batch of them (every leaf with the same leading axes).

        Returns:
            a number, or an array of the shape of the leading axes; -inf outside the constraints.
        """
        if self.cloud.density is None:
            raise InputError(
                "this posterior consists of weighted atoms and has no density: "
                "posterior.kernel_estimate() puts a kernel on each and has one"
            )
        plain, shape = self.cloud.parameters.flatten(theta)
        free = self.cloud.parameters.free(plain)
        outside = np.logical_not(np.isfinite(free).all(axis=1))
        free = np.where(np.expand_dims(outside, 1), self.theta[0], free)
        values = self.cloud.log_prob(free) - self.cloud.parameters.log_det(free)
        values[outside] = np.where(np.isnan(plain[outside]).any(1), np.nan, -np.inf)
        return values.reshape(shape)[()]

    def kernel_estimate(self, rule: Any = None) -> "Posterior":
        """A copy whose density has a kernel on every particle; the particles stay as they are.

        Args:
            rule: a kernel density, `pmd.densities.kernel()` by default.
        """
        from pmd import densities

        rule = densities.kernel() if rule is None else rule
        live = np.isfinite(self.log_weights)
        with jax.enable_x64(True):
            density = rule.fit(
                jax.random.key(0), self.theta[live], self.log_q[live], self.log_weights[live],
                num_draws=int(live.sum()),
            )  # fmt: skip
        return self.replace(density=density, atoms=False)

    def replace(self, **changes: Any) -> "Posterior":
        """A copy with some of its parts changed, by the names of the constructor's arguments."""
        return Posterior(**{name: getattr(self, name) for name in PARTS} | changes)

    def modes(self) -> "list[Mode]":
        """The modes: mass, centre and sd of each, the largest first."""
        return list(self._modes)

    @cached_property
    def _modes(self) -> "list[Mode]":
        from pmd.modes import find_modes

        return find_modes(self.cloud)

    # ------------------------------------------------------------------ forms to keep or show it in

    def to_dataframe(self) -> Any:
        """The particles as a pandas table: a column for each name, and `log_weight`."""
        pandas = require("pandas", "dataframe")
        table = pandas.DataFrame(self.cloud.plain, columns=self.names)
        return table.assign(log_weight=self.log_weights)

    def plot(self, parameters: Any = None, ax: Any = None, **options: Any) -> Any:
        """Marginals and pairs of parameters as a corner of axes; see `pmd.plot.corner`."""
        from pmd.plot import corner

        return corner(self, parameters, ax, **options)

    def save(self, path: Any) -> None:
        """Write the posterior to a NetCDF file; `pmd.load` reads it."""
        from pmd.storage import save

        save(self, path)

    def __str__(self) -> str:
        from pmd.summary import summary

        return summary(self)

    __repr__ = __str__

    # ------------------------------------------------------------------ going on

    def certify(
        self, data: Any, problem: "Problem | None" = None, seed: int = 1, **options: Any
    ) -> "Posterior":
        """One more exact pass from fresh draws, and an independent second run."""
        from pmd.certify import certify

        return certify(self, data, problem=problem, seed=seed, **options)

    def update(self, data: Any, **options: Any) -> "Posterior":
        """The posterior after new rows: the recursion goes on from here."""
        from pmd.update import update

        return update(self, data, **options)


PARTS = tuple(name for name in signature(Posterior.__init__).parameters if name != "self")


def probabilities(name: str, q: ArrayLike) -> np.ndarray:
    """Probabilities as an array, or an error that names the argument."""
    try:
        levels = np.asarray(q, dtype=float)
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"{name} takes probabilities from 0 to 1, not {q!r}") from error
    if not ((levels >= 0) & (levels <= 1)).all():
        raise InputError(f"{name} takes probabilities from 0 to 1, not {q!r}")
    return levels
