"""The base of a regression: one Gaussian, a mixture of them, or a mixture sharpened by log q."""

import jax
import numpy as np
from jax import Array
from scipy.special import logsumexp

from pmd.densities import mixture, ridge
from pmd.densities.mixture import Mixture
from pmd.densities.surrogate import Regressed, component_log_prob, mapped
from pmd.densities.whitened import Cloud


def standard(d: int) -> Mixture:
    """One standard Gaussian."""
    return Mixture._make((np.zeros(1), np.zeros((1, d)), np.eye(d)[None]))


def carried(previous: Regressed | None, cloud: Cloud) -> Mixture | None:
    """The last mixture in the coordinates of this cloud."""
    if previous is None:
        return None
    old, new = previous.coordinates, cloud.coordinates
    return mapped(previous.mix, new.inverse @ (old.mean - new.mean), new.inverse @ old.root)


def fit_base(key: Array, cloud: Cloud, start: Mixture | None) -> Mixture:
    """The weighted particles' Gaussian mixture, whitened; all particles count a little."""
    mix = mixture.clusters(key, cloud.z, 0.9 * cloud.weight + 0.1 / len(cloud.z), start=start)
    return jax.tree.map(np.asarray, mix)


def sharpen(mix: Mixture, cloud: Cloud, rows: np.ndarray) -> Mixture | None:
    """Each component's weight, mean and covariance by a quadratic fit of log q around it."""
    z, depth, d = cloud.z[rows], -cloud.log_q[rows], cloud.z.shape[1]
    parts = component_log_prob(mix, z)
    level, means, chols = np.full(len(mix.log_pi), np.nan), mix.mean.copy(), mix.chol.copy()
    for k, (mean, chol) in enumerate(zip(mix.mean, mix.chol, strict=True)):
        mine = (parts.argmax(1) == k) & (depth < 3 * cloud.core)
        if mine.sum() < 1.3 * cloud.coefficients:
            continue
        local = (z - mean) @ np.linalg.inv(chol).T
        y = -depth - parts[:, k] + mix.log_pi[k]
        shift = np.median(y[mine])
        below = np.maximum(depth - depth[mine].min() - cloud.core, 0)
        noise = np.where(mine, 1e-6 + (0.05 * below) ** 2, np.inf)
        near = ridge.rows_from(
            local, np.where(mine, y - shift, 0), noise, max(float(np.var(y[mine])), 0.01)
        )
        q = jax.tree.map(np.asarray, ridge.fit_quadratic(near))
        values, vectors = np.linalg.eigh(np.eye(d) - q.curvature)
        if not (values[0] > 0.1 and values[-1] < 100):
            continue
        cov = (vectors / values) @ vectors.T
        level[k] = shift + q.constant + 0.5 * q.slope @ cov @ q.slope - 0.5 * np.log(values).sum()
        means[k] = mean + chol @ (cov @ q.slope)
        chols[k] = np.linalg.cholesky(chol @ cov @ chol.T)
    if np.isnan(level).all():
        return None
    level = np.where(np.isnan(level), mix.log_pi + np.nanmedian(level - mix.log_pi), level)
    return Mixture._make((level - logsumexp(level), means, chols))
