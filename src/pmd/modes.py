"""The modes of a posterior: hills of the log-density at the particles, parted by dips."""

from typing import Any, NamedTuple

import numpy as np

from pmd.cloud import Cloud

PyTree = Any

# Two hills are one mode unless the density between them falls to half the lower of their tops.
DIP = np.log(2.0)
LEAST_MASS = 0.005  # a mode of less is counted with the nearest one
BETWEEN = 21  # points on a line between two tops


class Mode(NamedTuple):
    """One mode: its share of the mass, its mean and sds in the parameter's own structure."""

    mass: float
    centre: PyTree
    sd: PyTree


def find_modes(cloud: Cloud) -> list[Mode]:
    """Modes of a posterior, the largest first.

    log q is known at the particles. Going down from the highest, each joins the hill of its
    neighbours, and two hills become one where the pass between them is no dip (persistence).
    Straight lines between tops then join what gaps between particles have parted. Mass, mean and
    sds are sums over the points behind the posterior's means, each with its nearest particle.
    Modes of less than half a percent are not told apart.
    """
    live = np.isfinite(cloud.log_weights)
    theta, w = cloud.theta[live], cloud.particles.w[live]
    level = (cloud.log_weights + cloud.log_p0)[live]
    centre, inverse = whitening(theta, w)
    z = (theta - centre) @ inverse
    label = heavy(z, hills(cloud, theta, z, level), w)
    label = along_lines(cloud, theta, level, label)
    plain, free, weights = cloud.measure()
    which = np.zeros(len(free), int)
    if label.any():
        which = label[nearest(z, (free - centre) @ inverse, 1)[:, 0]]
    modes = []
    for each in range(label.max() + 1):
        inside = weights * (which == each)
        mass = float(inside.sum())
        if mass > 0:
            mean = inside @ plain / mass
            sd = np.sqrt(np.maximum(inside @ (plain - mean) ** 2 / mass, 0.0))
            modes.append(Mode(mass, *map(cloud.parameters.tree, (mean, sd))))
    return sorted(modes, key=lambda mode: -mode.mass)


def whitening(theta: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean, and the matrix that makes the covariance of weighted points the identity."""
    mean = w @ theta
    values, vectors = np.linalg.eigh((theta - mean).T @ ((theta - mean) * w[:, None]))
    floor = max(1e-12 * values[-1], np.finfo(float).tiny)
    return mean, vectors / np.sqrt(np.maximum(values, floor))


def nearest(z: np.ndarray, at: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k nearest of the points z to every point `at`, (n, k)."""
    from scipy.spatial import KDTree

    return np.reshape(KDTree(z).query(at, k)[1], (len(at), k))


def hills(cloud: Cloud, theta: np.ndarray, z: np.ndarray, level: np.ndarray) -> np.ndarray:
    """The index of the hill's top for every particle, over the graph of nearest neighbours."""
    n, d = z.shape
    k = min(n - 1, max(12, min(d, 30)))
    if k < 1:
        return np.zeros(n, int)
    other = nearest(z, z, k + 1)[:, 1:].ravel()
    one = np.repeat(np.arange(n), k)
    passes = np.minimum(level[one], level[other])
    if cloud.measured:
        # Neighbours need not be near: a density that is known to fit tells of a dip between them.
        middle = cloud.log_prob(0.5 * (theta[one] + theta[other])) - offset(cloud, theta, level)
        passes = np.minimum(passes, middle)
    top = np.arange(n)

    def find(i: int) -> int:
        while top[i] != i:
            top[i] = top[top[i]]
            i = top[i]
        return i

    for edge in np.argsort(-passes, kind="stable"):
        a, b = find(int(one[edge])), find(int(other[edge]))
        if a != b and passes[edge] > min(level[a], level[b]) - DIP:
            high, low = (a, b) if level[a] >= level[b] else (b, a)
            top[low] = high
    return np.array([find(i) for i in range(n)])


def offset(cloud: Cloud, theta: np.ndarray, level: np.ndarray) -> float:
    """What the density's values lie above the particles' log q: the constant, in the middle."""
    high = np.argsort(-level)[: max(len(level) // 2, 1)]
    return float(np.median(cloud.log_prob(theta[high]) - level[high]))


def heavy(z: np.ndarray, top: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The same, with particles on hills of little mass counted with the nearest other hill."""
    mass = np.bincount(top, w, len(w))
    enough = mass[top] >= min(LEAST_MASS, mass.max())
    top = top.copy()
    if not enough.all():
        inside = np.flatnonzero(enough)
        top[~enough] = top[inside][nearest(z[enough], z[~enough], 1)[:, 0]]
    return top


def along_lines(cloud: Cloud, theta: np.ndarray, level: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Numbers 0, 1, ... of the modes: tops that no dip of the fitted density parts are one."""
    tops, label = np.unique(top, return_inverse=True)
    if len(tops) < 2 or not cloud.measured:
        return label
    k, share = len(tops), np.linspace(0, 1, BETWEEN)[:, None]
    lines = [one + share * (other - one) for one in theta[tops] for other in theta[tops]]
    value = cloud.log_prob(np.concatenate(lines)).reshape(k, k, BETWEEN)
    lowest = value.min(2)
    for by in range(k):  # the best way between two tops may lead over others
        lowest = np.maximum(lowest, np.minimum(lowest[:, by, None], lowest[None, by]))
    return parted(value[:, 0, 0], lowest)[label]


def parted(top: np.ndarray, lowest: np.ndarray) -> np.ndarray:
    """A mode's number for every top: of the highest that no dip parts from it, or its own."""
    number = np.full(len(top), -1)
    done: list[int] = []
    for i in np.argsort(-top, kind="stable"):
        near = [j for j in done if lowest[i, j] > top[i] - DIP]
        number[i] = number[max(near, key=lambda j: lowest[i, j])] if near else number.max() + 1
        done.append(int(i))
    return number
