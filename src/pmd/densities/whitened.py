"""The particles as a regression sees them: sorted by log q, whitened, those too deep left out."""

from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.special import chdtri

from pmd import weights
from pmd.densities import mixture
from pmd.densities.surrogate import Coordinates, log_mean_exp
from pmd.errors import NotFiniteError

MANY = 500  # coefficients of a quadratic beyond which only quadratics are tried


class Cloud(NamedTuple):
    """Particles from the top of log q down, whitened by their weighted mean and covariance.

    The order makes what follows independent of the order the particles came in.
    """

    z: np.ndarray  # (n, d)
    log_q: np.ndarray  # (n,), 0 at the top
    weight: np.ndarray  # (n,), flattened
    coordinates: Coordinates
    top: float  # what was taken off log q
    log_mass: float  # log of the particles' mean weight
    core: float  # depth down to which the fit has to be right
    kept: int  # particles not too deep to be used

    @property
    def coefficients(self) -> int:
        """Number of coefficients of a full quadratic."""
        d = self.z.shape[1]
        return (d + 1) * (d + 2) // 2

    @property
    def big(self) -> bool:
        """Whether nothing but a quadratic is worth trying."""
        return self.coefficients > MANY


@jax.jit
def _summary(x: Array, log_w: Array, floor: ArrayLike) -> tuple[Array, Array, Array]:
    w = weights.temper(log_w, floor)
    return w, *mixture.moments(x, w)


def summary(x: np.ndarray, log_w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights flattened until their effective number is a tenth of n, mean, Cholesky factor."""
    n, d = x.shape
    more = -n % 8192  # one size: compiling it takes longer than some unused rows in every move
    log_w = np.pad(log_w, (0, more), constant_values=-np.inf)
    floor = min(0.5 * n, max(0.1 * n, 4 * d))
    w, mean, chol = _summary(np.pad(x, ((0, more), (0, 0))), log_w, floor)
    return np.asarray(w)[:n], np.asarray(mean), np.asarray(chol)


def coordinates_of(x: np.ndarray, log_w: np.ndarray) -> tuple[np.ndarray, np.ndarray, Coordinates]:
    """Flattened weights, whitened particles, and their coordinates.

    These depend on the particles alone, not on the coordinates they come in: axes are those of
    the fourth moments E |z|^2 z z', pointing along the third.
    """
    w, mean, chol = summary(x, log_w)
    inverse = np.linalg.inv(chol)
    # Once more, where the floor of the first covariance is next to nothing: nearly collinear
    # coordinates are whitened, too.
    _, second, correction = summary((x - mean) @ inverse.T, log_w)
    mean, root = mean + chol @ second, chol @ correction
    inverse = np.linalg.inv(correction) @ inverse
    z = (x - mean) @ inverse.T
    axes = np.linalg.eigh((z * (w * (z**2).sum(1))[:, None]).T @ z)[1]
    axes = axes * np.where(w @ (z @ axes) ** 3 < 0, -1.0, 1.0)
    return w, z @ axes, Coordinates(mean, root @ axes, axes.T @ inverse)


def whiten(theta: ArrayLike, log_q: ArrayLike, log_w: ArrayLike) -> Cloud:
    """Sort and whiten the particles; those of zero density count as mass, and for nothing else."""
    x, log_q, log_w = (np.asarray(a, np.float64) for a in (theta, log_q, log_w))
    log_mass = log_mean_exp(log_w)
    live = np.flatnonzero(np.isfinite(log_q) & np.isfinite(log_w))
    if not len(live):
        raise NotFiniteError("log_q is finite at no particle: there is nothing to fit")
    live = live[np.argsort(-log_q[live], kind="stable")]
    x, log_q, log_w = x[live], log_q[live], log_w[live]
    n, d = x.shape
    w, z, coordinates = coordinates_of(x, log_w)
    top, depth, p = log_q[0], log_q[0] - log_q, (d + 1) * (d + 2) // 2
    core = max(0.5 * chdtri(d, 1e-3), depth[min(int(0.75 * n), 2 * p)])
    limit = max(4 * core, depth[min(n - 1, 4 * p)])
    kept = int(np.searchsorted(depth, limit, side="right"))
    return Cloud(z, -depth, w, coordinates, top, log_mass, core, kept)
