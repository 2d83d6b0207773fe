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
    and sds are sums over the points behind the posterior's means, each in its likeliest cluster.
    """
    plain, free, weights = cloud.measure()
    with jax.enable_x64(True):
        found = mixture.clusters(jax.random.key(0), cloud.theta, cloud.particles.w)
        label = parted(*passes(cloud, found))
        parts = np.array(log_parts(found, jnp.asarray(free)))
    parts[:, label < 0] = -np.inf
    which = label[parts.argmax(1)]
    modes = []
    for each in range(label.max() + 1):
        w = weights * (which == each)
        mass = float(w.sum())
        if mass > 0:
            centre = w @ plain / mass
            sd = np.sqrt(np.maximum(w @ (plain - centre) ** 2 / mass, 0.0))
            modes.append(Mode(mass, *map(cloud.parameters.tree, (centre, sd))))
    return sorted(modes, key=lambda mode: -mode.mass)


def passes(cloud: Cloud, found: mixture.Mixture) -> tuple[np.ndarray, np.ndarray]:
    """Log-density at all centres, (K,), and at the lowest point between any two of them, (K, K).

    The lowest point is that of the best way, by straight lines from centre to centre.
    """
    centres = np.asarray(found.mean)
    k = len(centres)
    share = np.linspace(0, 1, BETWEEN)[:, None]
    lines = [one + share * (other - one) for one in centres for other in centres]
    log_prob = cloud.log_prob if cloud.density is not None else mixture_log_prob(found)
    level = log_prob(np.concatenate(lines)).reshape(k, k, BETWEEN)
    lowest = level.min(2)
    for by in range(k):
        lowest = np.maximum(lowest, np.minimum(lowest[:, by, None], lowest[None, by]))
    return level[:, 0, 0], lowest


def parted(top: np.ndarray, lowest: np.ndarray) -> np.ndarray:
    """A mode's number for every component; -1 for one on the pass between two modes.

    Components are taken from the highest down. One that a dip parts from all higher ones is a
    mode of its own, one that no dip parts from a single mode belongs to it.
    """
    label = np.full(len(top), -1)
    done: list[int] = []
    for i in np.argsort(-top, kind="stable"):
        near = {label[j] for j in done if label[j] >= 0 and lowest[i, j] > top[i] - DIP}
        if not near:
            label[i] = label.max() + 1
        elif len(near) == 1:
            label[i] = near.pop()
        done.append(int(i))
    return label


def mixture_log_prob(found: mixture.Mixture) -> Any:
    """The clusters' own log-density, for particles without one."""
    return lambda x: np.asarray(mixture.log_prob(found, x))
