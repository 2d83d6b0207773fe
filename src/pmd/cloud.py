"""Weighted particles and the density fitted to them, on the host: where all estimates come from."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from pmd.errors import InputError
from pmd.estimates import Estimate, Points, drawn, importance, moments, quantiles
from pmd.parameters import Parameters

# Draws of the fitted density behind an expectation: a power of two, as they are Sobol points.
DRAWS = 2**14


@dataclass(frozen=True, eq=False)
class Cloud:
    """Particles in free coordinates, their log-weights, and a fitted density or None."""

    parameters: Parameters
    theta: np.ndarray
    log_p0: np.ndarray
    log_weights: np.ndarray
    density: Any

    @cached_property
    def particles(self) -> Points:
        """The particles alone."""
        return Points(self.theta, np.exp(self.log_weights))

    @cached_property
    def both(self) -> Points:
        """The particles and draws of the density."""
        live = np.isfinite(self.log_weights)
        v = np.zeros(len(live))
        v[live] = importance(self.log_prob(self.theta[live]) - self.log_p0[live])
        count = min(max(DRAWS, 2 ** (4 * len(live) - 1).bit_length()), 4 * DRAWS)
        draws, u = self.draw(jax.random.key(0), count)
        return replace(self.particles, draws=draws, u=u, v=v, error=float(self.density.error))

    @property
    def measured(self) -> bool:
        """Whether there is a density of known error; others are not relied on unasked."""
        return self.density is not None and not np.isnan(self.density.error)

    def points(self, using: str | None) -> Points:
        """The particles, with draws of the density where they are asked for or may be better."""
        if using not in (None, "particles", "density"):
            raise InputError(f"using= takes None, 'particles' or 'density', not {using!r}")
        if using == "density" and self.density is None:
            raise InputError("using='density' needs a fitted density, and this posterior has none")
        alone = using == "particles" or (using is None and not self.measured)
        return self.particles if alone else self.both

    def draw(self, key: jax.Array, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws of the density and the weights that make them draws of what it means."""
        with jax.enable_x64(True):
            theta, log_f, log_q = (np.asarray(part, float) for part in self.density.draw(key, n))
        return theta, importance(log_q - log_f)

    def log_prob(self, free: np.ndarray) -> np.ndarray:
        """Log-density of what the fitted density means, in free coordinates."""
        if not len(free):
            return np.zeros(0)
        with jax.enable_x64(True):
            return np.array(self.density.log_prob(free), dtype=float)

    @cached_property
    def plain(self) -> np.ndarray:
        """The particles as plain numbers, (m, D)."""
        return self.parameters.constrain(self.theta)

    @cached_property
    def plain_draws(self) -> np.ndarray:
        """The draws of the density as plain numbers."""
        return self.parameters.constrain(drawn(self.both))

    @cached_property
    def _known(self) -> dict[str | None, Estimate]:
        return {}

    def moments(self, using: str | None = None) -> Estimate:
        """Means and sds of all plain numbers, (D,) each."""
        if using not in self._known:
            points = self.points(using)
            self._known[using] = moments(self.plain, lambda: self.plain_draws, points, using)
        return self._known[using]

    def measure(self, using: str | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The estimate behind means and quantiles as one measure.

        Returns:
            plain numbers (n, D), free coordinates (n, d), and weights (n,) that sum to one, some
            of them a little negative where the density is used.
        """
        if self.moments(using).using == "particles":
            return self.plain, self.theta, self.particles.w
        both = self.both
        assert both.v is not None
        assert both.u is not None
        return (
            np.concatenate([self.plain, self.plain_draws]),
            np.concatenate([self.theta, drawn(both)]),
            np.concatenate([both.w - both.v, both.u]),
        )

    def quantiles(self, levels: np.ndarray, using: str | None = None) -> np.ndarray:
        """Quantiles of all plain numbers, (levels, D)."""
        plain, _, weights = self.measure(using)
        return quantiles(plain, weights, levels)
