"""Densities by a small Gaussian mixture, fitted to the weighted particles: r = 0.

    q = sum_k pi_k N(mean_k, cov_k)

EM on the weighted particles, the number of components by BIC on their effective number, one
allowed. It smooths less than a kernel on every particle, and says by `error` how far log q is
from the mixture where the particles know it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from pmd.densities import mixture
from pmd.densities.mixture import Draws, Mixture
from pmd.errors import InputError
from pmd.weights import normalise

SPREAD = 0.2  # of the density drawn from, where `wide` asks for one


class GaussianMixture(NamedTuple):
    """A fitted density: a Gaussian mixture, and the one that draws come from.

    Attributes:
        meant: the mixture fitted.
        drawn: the same, or wider.
        error: standard deviation of log q - log mixture over the weighted particles near the top,
            in nats.
    """

    meant: Mixture
    drawn: Mixture
    error: float

    @property
    def name(self) -> str:
        """What was fitted."""
        return "mixture"

    @property
    def num_components(self) -> int:
        """Clusters seen."""
        return mixture.num_components(self.meant)

    def log_prob(self, theta: ArrayLike) -> Array:
        """log q at theta, (n, d): (n,)."""
        return _log_prob(self.meant, jnp.asarray(theta))

    def log_proposal(self, theta: ArrayLike) -> Array:
        """Log-density of the draws at theta, (n, d): (n,)."""
        return _log_prob(self.drawn, jnp.asarray(theta))

    def draw(self, key: Array, n: int) -> Draws:
        """n draws, scrambled Sobol points, with log f and log q at them."""
        d = self.drawn.mean.shape[1]
        seed = int(jax.random.bits(key, dtype=np.uint32))
        u = jnp.asarray(mixture.sobol(seed, n, d + 1), self.drawn.mean.dtype)
        return _place(self.drawn, self.meant, u)

    def pack(self) -> dict[str, np.ndarray]:
        """The density as named arrays."""
        parts = {
            f"{which}_{name}": np.asarray(value)
            for which in ("meant", "drawn")
            for name, value in getattr(self, which)._asdict().items()
        }
        return parts | {"rule": np.asarray("gaussian"), "error": np.asarray(self.error)}

    @staticmethod
    def unpack(parts: Mapping[str, np.ndarray]) -> "GaussianMixture":
        """The inverse of `pack`."""
        meant, drawn = (
            Mixture(*(jnp.asarray(parts[f"{which}_{name}"]) for name in Mixture._fields))
            for which in ("meant", "drawn")
        )
        return GaussianMixture(meant, drawn, float(parts["error"]))


_log_prob = jax.jit(mixture.log_prob)


@jax.jit
def _place(drawn: Mixture, meant: Mixture, u: Array) -> Draws:
    theta = mixture.transport(drawn, u)
    return Draws(theta, mixture.log_prob(drawn, theta), mixture.log_prob(meant, theta))


@jax.jit
def _moments(theta: Array, w: Array) -> tuple[Array, Array]:
    return mixture.moments(theta, w)


@jax.jit
def _error(mix: Mixture, theta: Array, log_q: Array, w: Array, core: ArrayLike) -> Array:
    """sd of log q - log mix under w, over the particles less than `core` nats below the top."""
    near = (w > 0) & (log_q > jnp.max(log_q) - core)
    w = jnp.where(near, w, 0)
    w = w / jnp.sum(w)
    gap = jnp.where(near, log_q - mixture.log_prob(mix, theta), 0)
    return jnp.sqrt(jnp.sum(w * (gap - jnp.sum(w * gap)) ** 2))


@dataclass(frozen=True)
class Gaussian:
    """The density that `gaussian` makes; see there."""

    max_components: int = 8
    wide: float = 0.0
    guard: float = 0.3
    jittable: bool = False
    exact: str = "never"

    def fit(
        self,
        key: Array,
        theta: ArrayLike,
        log_q: ArrayLike,
        log_w: ArrayLike,
        *,
        num_draws: int = 0,
        previous: GaussianMixture | None = None,
        give_up: float = np.inf,
    ) -> GaussianMixture:
        """Fit a Gaussian mixture to the weighted particles.

        Args:
            key: a JAX key.
            theta: particles, (m, d).
            log_q: log-density at them, up to a constant; it is only compared with the mixture.
            log_w: log-weights, up to a constant; -inf for particles to ignore.
            num_draws: not needed.
            previous: the last fitted density: one of the starts of EM.
            give_up: not needed: there is nothing else to try.
        """
        from scipy.special import chdtri

        del num_draws
        theta, log_q = jnp.asarray(theta), jnp.asarray(log_q)
        w = normalise(log_w).astype(theta.dtype)
        start = None if previous is None else previous.meant
        mix = mixture.clusters(key, theta, w, start=start, most=self.max_components)
        # Where a Gaussian has all but a thousandth of its mass.
        core = 0.5 * float(chdtri(theta.shape[1], 1e-3))
        error = float(_error(mix, theta, log_q, w, core))
        if self.wide == 0:
            return GaussianMixture(mix, mix, error)
        drawn = mixture.widen(mix, SPREAD, self.wide, *_moments(theta, w))
        return GaussianMixture(mix, drawn, error)


def gaussian(*, max_components: int = 8, wide: float = 0.0) -> Gaussian:
    """Densities by a Gaussian mixture, the number of its components found by BIC.

    Args:
        max_components: largest number of components; 1 for one Gaussian.
        wide: draws come from a mixture a little wider than the one meant, with this share of its
            weight in one Gaussian over everything; at 0 they come from the one meant.

    Example:
        >>> import jax
        >>> from pmd.densities.gaussian import gaussian
        >>> theta = jax.random.normal(jax.random.key(0), (500, 2))
        >>> log_q = -0.5 * (theta**2).sum(1)
        >>> fitted = gaussian().fit(jax.random.key(1), theta, log_q, 0 * log_q)
        >>> fitted.num_components, fitted.error < 0.2
        (1, True)
    """
    if max_components < 1:
        raise InputError(f"max_components must be 1 or more, got {max_components}")
    if not 0 <= wide < 1:
        raise InputError(f"wide is a share of the weight, from 0 to less than 1, got {wide}")
    return Gaussian(max_components, wide)
