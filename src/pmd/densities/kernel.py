"""Densities with one kernel per particle: the paper's estimator (eq. weighted_kde) and its rules.

    q(theta) = sum_i w_i K_H(theta - theta_i)

A rule says how wide the kernels are and where they sit. The paper's are isotropic: `isotropic`,
`theory`, `median`. They collapse above some five dimensions; `scott` (full covariance, centres
shrunk so that moving keeps the variance) and `local` (the same for each cluster) do not. Fits,
draws and log-densities can be traced, so that moving at every step runs as one scan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from pmd.densities.blocked import (
    Centres,
    Gaussian,
    Shape,
    epanechnikov,
    gaussian_kernel,
    log_sum,
)
from pmd.densities.mixture import (
    Draws,
    clusters_jittable,
    component_log_prob,
    dot,
    inverse_of,
    moments,
    place,
)
from pmd.errors import InputError, InputTypeError

PAIRED = 2000  # particles behind a median distance
SHIFTS = 64  # partners of each


class Bandwidth(NamedTuple):
    """Kernels for one cloud: theta_i = centre_i + chol_k z, z ~ K, k the cluster of particle i."""

    centre: Array  # (m, d)
    cluster: Array  # (m,)
    chol: Array  # (K, d, d)


class Rule(Protocol):
    """How wide the kernels are, and where they sit."""

    def __call__(self, key: Array, theta: Array, w: Array, count: Array) -> Bandwidth:
        """Kernels for particles (m, d) of normalised weights (m,), `count` of them in use."""
        ...


def _everywhere(theta: Array, h: Array) -> Bandwidth:
    """One isotropic kernel of standard deviation h on every particle."""
    chol = h.astype(theta.dtype) * jnp.eye(theta.shape[1], dtype=theta.dtype)
    return Bandwidth(theta, jnp.zeros(len(theta), jnp.int32), chol[None])


@dataclass(frozen=True)
class isotropic:
    """h = c m^(-power): with power 1/2 the paper's rule in its mixture experiment.

    Example:
        >>> from pmd.densities.kernel import isotropic, kernel
        >>> kernel(isotropic(c=2.0)).rule
        isotropic(c=2.0, power=0.5)
    """

    c: float = 1.0
    power: float = 0.5

    def __post_init__(self) -> None:
        if not self.c > 0:
            raise InputError(f"isotropic(c=...) is a bandwidth and must be positive, got {self.c}")

    def __call__(self, key: Array, theta: Array, w: Array, count: Array) -> Bandwidth:
        return _everywhere(theta, self.c * count.astype(theta.dtype) ** -self.power)


@dataclass(frozen=True)
class theory:
    """h = m^(-1 / (d + 2 beta)), the paper's rule in theory, for densities of smoothness beta."""

    beta: float = 2.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise InputError(f"theory(beta=...) is a smoothness and must be positive: {self.beta}")

    def __call__(self, key: Array, theta: Array, w: Array, count: Array) -> Bandwidth:
        power = -1 / (theta.shape[1] + 2 * self.beta)
        return _everywhere(theta, count.astype(theta.dtype) ** power)


@dataclass(frozen=True)
class median:
    """h = factor times the median distance of two particles: how the paper scores samples.

    The median is over pairs weighted by w_i w_j, among at most 2000 particles and 64 partners of
    each. Where it is zero, h is rounding: 8 eps times the largest coordinate, plus tiny^(1/4).
    """

    factor: float = 0.1

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise InputError(f"median(factor=...) must be positive, got {self.factor}")

    def __call__(self, key: Array, theta: Array, w: Array, count: Array) -> Bandwidth:
        some = min(len(theta), PAIRED)
        # Live rows in random order: a cyclic shift by up to half their number pairs each two once.
        chosen = jax.lax.top_k(jnp.where(w > 0, jax.random.uniform(key, w.shape), -1), some)[1]
        x, v = theta[chosen], w[chosen]
        live = jnp.minimum(count, some)

        def partners(shift: Array) -> tuple[Array, Array]:
            at = (jnp.arange(some) + shift) % jnp.maximum(live, 1)
            twice = jnp.where(2 * shift == live, 0.5, 1).astype(v.dtype)
            valid = (jnp.arange(some) < live) & (2 * shift <= live)
            return jnp.sqrt(jnp.sum((x - x[at]) ** 2, axis=1)), valid * twice * v * v[at]

        shifts = jnp.arange(1, min(SHIFTS, max(some // 2, 1)) + 1)
        distance, mass = jax.tree.map(jnp.ravel, jax.lax.map(partners, shifts))
        order = jnp.argsort(distance)
        edges = jnp.cumsum(mass[order])
        # The middle one, or between the middle two, whichever way the sums were rounded.
        half = 0.5 * edges[-1] * (1 + 64 * jnp.finfo(edges.dtype).eps * jnp.array([-1, 1]))
        middle = jnp.minimum(jnp.searchsorted(edges, half.astype(edges.dtype)), len(order) - 1)
        info = jnp.finfo(theta.dtype)
        largest = jnp.max(jnp.where(w[:, None] > 0, jnp.abs(theta), 0))
        floor = 8 * info.eps * largest + float(info.tiny) ** 0.25
        found = jnp.mean(distance[order][middle])
        return _everywhere(theta, jnp.maximum(self.factor * jnp.where(count > 1, found, 0), floor))


def _shrunk(theta: Array, w: Array) -> tuple[Array, Array, Array]:
    """Scott's bandwidth with Liu and West's shrinkage for weights w: (a, mean, h L).

    h = min(1, n^(-1 / (d + 4))), n the effective number; a = sqrt(1 - h^2); centres a theta_i +
    (1 - a) mean with kernels h L, L L' the covariance, have the particles' mean and covariance.
    """
    mass = jnp.sum(w)
    mean, chol = moments(theta, w / jnp.where(mass > 0, mass, 1))
    n = jnp.maximum(mass**2 / jnp.maximum(jnp.sum(w * w), jnp.finfo(w.dtype).tiny), 1)
    h = n ** (-1 / (theta.shape[1] + 4))
    return jnp.sqrt(1 - h * h), mean, h * chol


@dataclass(frozen=True)
class scott:
    """Scott's rule with the full covariance, and centres shrunk towards the mean (Liu and West).

    h = min(1, ESS^(-1 / (d + 4))), kernels N(0, h^2 cov), centres a theta_i + (1 - a) mean with
    a = sqrt(1 - h^2): the mixture has the mean and the covariance of the weighted particles.
    """

    def __call__(self, key: Array, theta: Array, w: Array, count: Array) -> Bandwidth:
        a, mean, chol = _shrunk(theta, w)
        centre = a * theta + (1 - a) * mean
        return Bandwidth(centre, jnp.zeros(len(theta), jnp.int32), chol[None])


@dataclass(frozen=True)
class local:
    """`scott` for each cluster of the particles; their number, up to `most`, is found by BIC."""

    most: int = 4

    def __post_init__(self) -> None:
        if self.most < 1:
            raise InputError("local(most=...) is a number of clusters: 1 or more")

    def __call__(self, key: Array, theta: Array, w: Array, count: Array) -> Bandwidth:
        mix = clusters_jittable(key, theta, w, most=self.most)
        cluster = jnp.argmax(component_log_prob(mix, theta), axis=1).astype(jnp.int32)
        shares = jnp.where(cluster == jnp.arange(self.most)[:, None], w, 0)
        a, mean, chol = jax.vmap(_shrunk, (None, 0))(theta, shares)
        # Too few particles for a covariance of their own: EM's, which saw its neighbours too.
        few = jnp.sum(shares, 1) ** 2 <= (theta.shape[1] + 1) * jnp.sum(shares**2, axis=1)
        a, mean = jnp.where(few, 0, a), jnp.where(few[:, None], mix.mean, mean)
        chol = jnp.where(few[:, None, None], mix.chol, chol)
        centre = a[cluster, None] * theta + (1 - a[cluster, None]) * mean[cluster]
        return Bandwidth(centre, cluster, chol)


class Arrays(NamedTuple):
    """What is an array in a fitted density: programs depend on the shapes of these alone."""

    centre: Array
    log_weight: Array
    cluster: Array
    chol: Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[*Arrays._fields],
    meta_fields=["kernel", "independent", "name"],
)
@dataclass(frozen=True)
class KernelMixture:
    """A fitted density: one kernel per particle, sorted by cluster, those of zero weight last.

    Attributes:
        centre: (m, d).
        log_weight: (m,), normalised; -inf for kernels that are not in use.
        cluster: (m,), which of the bandwidths; their number for kernels that are not in use.
        chol: (K, d, d), lower; a draw is centre + chol z.
        kernel: the distribution of z.
        independent: whether draws pick centres independently rather than systematically.
        name: the rule that made it.
    """

    centre: Array
    log_weight: Array
    cluster: Array
    chol: Array
    kernel: Shape
    independent: bool
    name: str

    @property
    def error(self) -> float:
        """Held-out error of log q: not measured, as a kernel mixture does not look at log q."""
        return float("nan")

    @property
    def num_components(self) -> int:
        """Clusters seen."""
        return len(np.unique(np.asarray(self.cluster)[np.isfinite(np.asarray(self.log_weight))]))

    def log_prob(self, theta: ArrayLike) -> Array:
        """log q at theta, (n, d): (n,)."""
        return _log_prob(self.kernel, self._arrays, jnp.asarray(theta))

    def draw(self, key: Array, n: int, independent: bool | None = None) -> Draws:
        """n draws and their log-density, sorted by cluster.

        Args:
            key: a JAX key.
            n: how many.
            independent: pick centres independently (multinomial numbers of draws per centre, as
                in Algorithm 1) instead of systematically; by default as the density was made.
        """
        independent = self.independent if independent is None else independent
        return _draw(self.kernel, self._arrays, key, n, independent)

    def pack(self) -> dict[str, np.ndarray]:
        """The density as named arrays."""
        arrays = {k: np.asarray(v) for k, v in self._arrays._asdict().items()}
        facts = {"rule": "kernel", "kernel": self.kernel.name, "name": self.name}
        facts |= {"independent": self.independent}
        return arrays | {k: np.asarray(v) for k, v in facts.items()}

    @staticmethod
    def unpack(parts: Mapping[str, np.ndarray]) -> "KernelMixture":
        """The inverse of `pack`."""
        compact = str(parts["kernel"]) == epanechnikov.name
        return KernelMixture(
            *(jnp.asarray(parts[k]) for k in Arrays._fields),
            kernel=epanechnikov if compact else gaussian_kernel,
            independent=bool(parts["independent"]),
            name=str(parts["name"]),
        )

    @property
    def _arrays(self) -> Arrays:
        return Arrays(self.centre, self.log_weight, self.cluster, self.chol)


@partial(jax.jit, static_argnums=0)
def _log_prob(kernel: Shape, fitted: Arrays, theta: Array) -> Array:
    """Whiten by each cluster's bandwidth about the mean of all centres, and sum in blocks."""
    dtype, d = jnp.result_type(fitted.centre, theta), theta.shape[1]
    used = jnp.isfinite(fitted.log_weight)
    weight = jnp.exp(fitted.log_weight).astype(dtype)
    spot = jnp.where(used[:, None], fitted.centre, 0).astype(dtype)
    middle = dot(weight, spot)
    inverse = inverse_of(fitted.chol.astype(dtype))
    cluster = jnp.minimum(fitted.cluster, len(inverse) - 1)
    log_det = jnp.sum(jnp.log(jnp.diagonal(inverse, axis1=1, axis2=2)), axis=1)
    level = fitted.log_weight + log_det[cluster] + kernel.log_constant(d)
    z = place(cluster, spot - middle, jnp.zeros((len(inverse), d), dtype), inverse)
    centres = Centres(z, level.astype(dtype), fitted.cluster, jnp.sum(used))

    def whiten(block: Array) -> Array:
        return jax.lax.map(lambda factor: dot(block - middle, factor.T), inverse)

    return log_sum(kernel, centres, whiten, theta.astype(dtype))


@partial(jax.jit, static_argnames=("kernel", "n", "independent"))
def _draw(kernel: Shape, fitted: Arrays, key: Array, n: int, independent: bool) -> Draws:
    """Pick centres by inverting the cumulative weights, add kernels, evaluate."""
    pick, jitter = jax.random.split(key)
    dtype, d = fitted.centre.dtype, fitted.centre.shape[1]
    # Rounding can make a long cumulative sum in float32 step back.
    edges = jax.lax.cummax(jnp.cumsum(jnp.exp(fitted.log_weight)))
    if independent:
        u = jnp.sort(jax.random.uniform(pick, (n,), dtype))
    else:
        u = (jnp.arange(n) + jax.random.uniform(pick, (), dtype)) / n
    last = jnp.maximum(jnp.sum(jnp.isfinite(fitted.log_weight)) - 1, 0)
    centre = jnp.minimum(jnp.searchsorted(edges, u * edges[-1], side="right"), last)
    z = kernel.sample(jitter, (n, d), np.dtype(dtype))
    shift = jnp.zeros((len(fitted.chol), d), dtype)
    theta = fitted.centre[centre] + place(fitted.cluster[centre], z, shift, fitted.chol)
    log_q = _log_prob(kernel, fitted, theta)
    return Draws(theta, log_q, log_q)


@dataclass(frozen=True)
class Kernel:
    """The density that `kernel` makes; see there."""

    rule: Rule
    kernel: Shape
    independent: bool
    guard: float = 0.3
    jittable: bool = True
    exact: str = "never"

    def fit(
        self,
        key: Array,
        theta: ArrayLike,
        log_q: ArrayLike,
        log_w: ArrayLike,
        *,
        num_draws: int = 0,
        previous: KernelMixture | None = None,
    ) -> KernelMixture:
        """Put a kernel on every particle of positive weight.

        Args:
            key: a JAX key.
            theta: particles, (m, d).
            log_q: not looked at: a kernel estimate takes the particles for a sample.
            log_w: log-weights, (m,), up to a constant.
            num_draws: not needed.
            previous: not needed.
        """
        del log_q, num_draws, previous
        arrays = _fit(self.rule, key, jnp.asarray(theta), jnp.asarray(log_w))
        name = type(self.rule).__name__
        return KernelMixture(*arrays, kernel=self.kernel, independent=self.independent, name=name)


@partial(jax.jit, static_argnums=0)
def _fit(rule: Rule, key: Array, theta: Array, log_w: Array) -> Arrays:
    """Kernels by the rule, sorted by cluster, those of zero weight last."""
    used = ~jnp.isneginf(log_w)
    log_weight = jax.nn.log_softmax(log_w).astype(theta.dtype)
    theta = jnp.where(used[:, None], theta, 0)
    found = rule(key, theta, jnp.exp(log_weight), jnp.sum(used))
    cluster = jnp.where(used, found.cluster, len(found.chol))
    order = jnp.argsort(cluster, stable=True)
    return Arrays(found.centre[order], log_weight[order], cluster[order], found.chol)


def kernel(
    rule: Rule | None = None, *, kernel: Shape = gaussian_kernel, independent: bool = False
) -> Kernel:
    """Densities with one kernel per particle: sum_i w_i K_H(theta - theta_i), eq. weighted_kde.

    Args:
        rule: `scott()` (default), `local()`, or one of the paper's: `isotropic()`, `theory()`,
            `median()`.
        kernel: `gaussian_kernel` or `epanechnikov`, of compact support.
        independent: draws pick centres independently, as in Algorithm 1, instead of
            systematically.

    Example:
        >>> import jax
        >>> from pmd.densities.kernel import kernel
        >>> theta = jax.random.normal(jax.random.key(0), (500, 2))
        >>> log_w = 0 * theta[:, 0]
        >>> fitted = kernel().fit(jax.random.key(1), theta, log_w, log_w)
        >>> fitted.draw(jax.random.key(2), 1000).theta.shape
        (1000, 2)
    """
    rule = scott() if rule is None else rule
    if isinstance(rule, type) or not callable(rule):
        raise InputTypeError(f"rule must be a rule such as pmd.densities.scott(), got {rule!r}")
    if not isinstance(kernel, type(epanechnikov) | Gaussian):
        raise InputTypeError(
            f"kernel must be pmd.densities.gaussian_kernel or epanechnikov, got {kernel!r}"
        )
    return Kernel(rule, kernel, independent)
