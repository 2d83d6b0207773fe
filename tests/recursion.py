"""The recursion once more, in dense float64 NumPy: what the compiled steps are held against."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from pmd.likelihood import Blocks
from pmd.mirror import Info, State, Steps, initial, stretch
from pmd.problem import Flat


class Dense:
    """Mirror descent at fixed particles: log q, row weights, and what is left of the start."""

    def __init__(self, flat: Flat, state: State, rows: Any):
        count = int(state.count)
        theta = state.theta[:count]
        self.log_prior = np.asarray(flat.log_prior(theta), float)
        self.log_start = np.asarray(flat.log_start(theta), float)
        self.log_p0 = np.asarray(state.log_p0, float)[:count]
        self.log_likelihood = np.asarray(flat.log_likelihood(theta, rows), float)  # (N, m)
        self.log_q = np.asarray(state.log_q, float)[:count]
        self.c = np.zeros(len(self.log_likelihood))
        self.a = 1.0
        self.log_evidence = 0.0

    @property
    def log_w(self) -> np.ndarray:
        """Log-weights of the particles."""
        return self.log_q - self.log_p0

    def target(self, index: np.ndarray) -> np.ndarray:
        """log p + (N/B) sum_b log p(x_b | .)."""
        scale = len(self.c) / len(index)
        return self.log_prior + scale * self.log_likelihood[index].sum(axis=0)

    def step(self, index: np.ndarray, g: float) -> float:
        """One step of size g on rows `index`; the log-normaliser."""
        log_q = (1 - g) * self.log_q + g * self.target(index)
        log_z = log_total(log_q - self.log_p0) - float(np.log(len(log_q)))
        self.log_q = log_q - log_z
        self.log_evidence = (1 - g) * self.log_evidence + log_z
        self.c *= 1 - g
        np.add.at(self.c, index, g * len(self.c) / len(index))
        self.a *= 1 - g
        return log_z

    def iterate(self) -> np.ndarray:
        """The exact iterate at the particles, from its formula: not normalised."""
        prior = self.a * self.log_start + (1 - self.a) * self.log_prior
        return prior + self.c @ self.log_likelihood


def log_total(log_w: Any) -> float:
    """log sum exp."""
    return float(np.asarray(logsumexp(np.asarray(log_w, float))))


def effective(log_w: np.ndarray) -> float:
    """Effective number of particles."""
    return float(np.exp(2 * log_total(log_w) - log_total(2 * log_w)))


def apart(a: Any, b: Any) -> float:
    """The largest difference between two functions known up to a constant."""
    off = np.asarray(a, float) - np.asarray(b, float)
    return float(np.abs(off - np.median(off)).max())


class Loop:
    """The compiled loop on data in memory, with sizes and steps given by hand."""

    def __init__(
        self, flat: Flat, rows: Any, count: int, *, seed: int = 0, capacity: int = 256,
        blocks: Blocks | None = None, length: int = 16,
    ):  # fmt: skip
        self.flat, self.rows, self.length = flat, jax.tree.map(jnp.asarray, rows), length
        self.num_data = len(jax.tree.leaves(rows)[0])
        self.blocks = Blocks(32, 8) if blocks is None else blocks
        capacity = self.blocks.capacity(max(count, capacity))  # the same for most: one program
        number = jnp.asarray(count, jnp.int32)
        self.state = initial(flat, jax.random.key(seed), number, capacity, self.num_data)

    def run(
        self, order: Any, sizes: Any, g: Any, *, floor: float = 0.0, level: float = 0.0,
        first: int = 0, draw: Any = None, counts: Any = None, seed: int = 0,
    ) -> tuple[State, Info, int]:  # fmt: skip
        """Steps on consecutive windows of `order`; the state of the loop moves on."""
        kind = self.state.log_q.dtype
        sizes, g = np.asarray(sizes), np.asarray(g)
        counts = np.full(len(sizes), int(self.state.count)) if counts is None else counts

        def fill(values: Any, dtype: Any) -> jax.Array:
            out = np.zeros(self.length, dtype)
            out[: len(values)] = values
            return jnp.asarray(out)

        steps = Steps(
            fill(np.cumsum(sizes) - sizes, np.int32), fill(sizes, np.int32), fill(g, kind),
            fill(counts, np.int32),
        )  # fmt: skip
        padded = np.zeros(8 * self.num_data, np.int32)
        padded[: len(order)] = order
        self.state, infos, done = stretch(
            self.flat, self.blocks, self.state, self.rows, jnp.asarray(padded), steps,
            np.int32(first), np.int32(len(sizes)), kind.type(floor), kind.type(level),
            jax.random.key(seed), draw,
        )  # fmt: skip
        return self.state, infos, int(done)
