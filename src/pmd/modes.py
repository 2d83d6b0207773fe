"""The modes of a posterior: clusters of its points that a dip of the density parts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pmd.cloud import Cloud
from pmd.densities import mixture

PyTree = Any

# Two clusters are one mode unless the density between them falls to half the lower of their tops.
DIP = np.log(2.0)
BETWEEN = 21

log_parts = jax.jit(mixture.component_log_prob)


class Mode(NamedTuple):
    """One mode: its share of the mass, its mean and sds in the parameter's own structure."""

    mass: float
    centre: PyTree
    sd: PyTree


def find_modes(cloud: Cloud) -> list[Mode]:
    """Modes of a posterior, the largest first.

    A Gaussian mixture (number of components by BIC) clusters the weighted particles; components
    that no dip of the density parts are one mode (a banana takes several components). Mass, mean
    and sds are sums over the points behind the posterior's means, each in its nearest cluster.
    """
    plain, free, weights = cloud.measure()
    with jax.enable_x64(True):
        found = mixture.clusters(jax.random.key(0), cloud.theta, cloud.particles.w)
        nearest = np.asarray(log_parts(found, jnp.asarray(free))).argmax(1)
        label = joined(cloud, found)
    modes = []
    for each in np.unique(label):
        w = weights * (label[nearest] == each)
        mass = float(w.sum())
        if mass > 0:
            centre = w @ plain / mass
            sd = np.sqrt(np.maximum(w @ (plain - centre) ** 2 / mass, 0.0))
            modes.append(Mode(mass, *map(cloud.parameters.tree, (centre, sd))))
    return sorted(modes, key=lambda mode: -mode.mass)


def joined(cloud: Cloud, found: mixture.Mixture) -> np.ndarray:
    """A label for every component, the same for those that no dip of the density parts."""
    centres = np.asarray(found.mean)
    label = np.arange(len(centres))
    share = np.linspace(0, 1, BETWEEN)[:, None]
    pairs = [(i, j) for i in range(len(centres)) for j in range(i)]
    paths = [centres[i] + share * (centres[j] - centres[i]) for i, j in pairs]
    if not paths:
        return label
    path = np.concatenate(paths)
    log_prob = cloud.log_prob if cloud.density is not None else mixture_log_prob(found)
    for (i, j), level in zip(pairs, log_prob(path).reshape(-1, BETWEEN), strict=True):
        if level.min() > min(level[0], level[-1]) - DIP:
            label[label == label[i]] = label[j]
    return label


def mixture_log_prob(found: mixture.Mixture) -> Any:
    """The clusters' own log-density, for particles without one."""
    return lambda x: np.asarray(mixture.log_prob(found, x))
