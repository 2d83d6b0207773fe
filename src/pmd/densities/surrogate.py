"""What a regression leaves behind: a log-density that can be evaluated, and a mixture to draw from.

Everything is computed in whitened coordinates z, theta = mean + root z, and in float64, whatever
the caller's precision; arrays are kept as NumPy arrays, so that nothing of it leaks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from pmd.densities import mixture, ridge
from pmd.densities.mixture import Draws, Mixture

BLOCK = 512


class Coordinates(NamedTuple):
    """theta = mean + root z, with the inverse of root."""

    mean: np.ndarray
    root: np.ndarray
    inverse: np.ndarray

    @property
    def log_det(self) -> float:
        """log |det root|: log-densities of z less this are those of theta."""
        return float(np.linalg.slogdet(self.root)[1])


class Surrogate(NamedTuple):
    """s(z) = log base(z) + shift + clip(r(z), low, high)."""

    base: Mixture
    residual: ridge.Residual
    shift: float
    low: float = -np.inf
    high: float = np.inf


def traced(surrogate: Surrogate, z: Array) -> Array:
    """s at whitened points (n, d), as one traceable function."""
    surrogate = jax.tree.map(jnp.asarray, surrogate)
    residual = jnp.clip(ridge.evaluate(surrogate.residual, z), surrogate.low, surrogate.high)
    return mixture.log_prob(surrogate.base, z) + surrogate.shift + residual


def log_density(surrogate: Surrogate, z: np.ndarray) -> np.ndarray:
    """s at whitened points (n, d): base and residual by themselves, so that programs add up."""
    residual = np.clip(evaluate(surrogate.residual, z), surrogate.low, surrogate.high)
    return log_mixture(surrogate.base, z) + surrogate.shift + residual


def gaussian(surrogate: Surrogate) -> Mixture | None:
    """s normalised, where it is a Gaussian: one base and a negative definite quadratic."""
    residual, base = surrogate.residual, surrogate.base
    if not isinstance(residual, ridge.Quadratic) or mixture.num_components(base) > 1:
        return None
    inverse = np.linalg.inv(np.asarray(base.chol[0]))
    precision = inverse.T @ inverse - np.asarray(residual.curvature)
    if not np.isfinite(precision).all() or np.linalg.eigvalsh(precision)[0] < 0.05:
        return None
    cov = np.linalg.inv(precision)
    slope = np.asarray(residual.slope) + inverse.T @ inverse @ np.asarray(base.mean[0])
    return Mixture._make((np.zeros(1), (cov @ slope)[None], np.linalg.cholesky(cov)[None]))


def few_sizes(mix: Mixture) -> Mixture:
    """The same mixture with unused components up to 1, 2, 4, 8, ... of them, as NumPy arrays."""
    log_pi, mean, chol = (np.asarray(a, np.float64) for a in mix)
    more = 2 ** (len(log_pi) - 1).bit_length() - len(log_pi)
    again = np.concatenate([np.arange(len(log_pi)), np.zeros(more, int)])
    log_pi = np.concatenate([log_pi, np.full(more, -np.inf)])
    return Mixture._make((log_pi, mean[again], chol[again]))


def mapped(mix: Mixture, mean: np.ndarray, root: np.ndarray) -> Mixture:
    """The mixture of mean + root z, for z of a mixture."""
    r = np.linalg.qr(np.swapaxes(root @ np.asarray(mix.chol), 1, 2), mode="r")
    sign = np.sign(np.diagonal(r, axis1=1, axis2=2))
    chol = np.swapaxes(r, 1, 2) * np.where(sign == 0, 1.0, sign)[:, None]
    return Mixture._make((np.asarray(mix.log_pi), mean + np.asarray(mix.mean) @ root.T, chol))


def in_blocks(function: Callable[..., Any], fixed: Any, *rows: np.ndarray) -> Any:
    """function(fixed, *rows) by blocks of 512 rows: one compiled program for any number of them."""
    n = len(rows[0])
    fixed = jax.device_put(fixed)
    parts = []
    for i in range(0, n, BLOCK):
        block = [a[i : i + BLOCK] for a in rows]
        more = BLOCK - len(block[0])
        if more:
            block = [np.concatenate([a, np.repeat(a[:1], more, axis=0)]) for a in block]
        parts.append(function(fixed, *block))
    return jax.tree.map(lambda *a: np.concatenate([np.asarray(x) for x in a])[:n], *parts)


_traced, _log_mixture = jax.jit(traced), jax.jit(mixture.log_prob)
_component_log_prob = jax.jit(mixture.component_log_prob)
_evaluate = jax.jit(ridge.evaluate)


def evaluate(residual: ridge.Residual, z: np.ndarray) -> np.ndarray:
    """r at whitened points."""
    return in_blocks(_evaluate, residual, z)


def log_mixture(mix: Mixture, z: np.ndarray) -> np.ndarray:
    """log-density of a mixture at whitened points."""
    return in_blocks(_log_mixture, few_sizes(mix), z)


def component_log_prob(mix: Mixture, z: np.ndarray) -> np.ndarray:
    """log pi_k + log-density of component k at whitened points, (n, K)."""
    return in_blocks(_component_log_prob, few_sizes(mix), z)


@jax.jit
def _propose(proposal: Mixture, u: Array) -> tuple[Array, Array]:
    z = mixture.transport(proposal, u)
    return z, mixture.log_prob(proposal, z)


def propose(
    surrogate: Surrogate, proposal: Mixture, n: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """n draws z from the proposal (scrambled Sobol), log f(z) and s(z)."""
    u = mixture.sobol(seed, n, proposal.mean.shape[1] + 1)
    z, log_f = in_blocks(_propose, proposal, u)
    return z, log_f, log_density(surrogate, z)


def seed_of(key: Array) -> int:
    """A seed for NumPy from a JAX key."""
    return int(jax.random.bits(key, dtype=np.uint32))


def ess(log_w: np.ndarray) -> float:
    """Effective number of draws."""
    return float(np.exp(2 * np.logaddexp.reduce(log_w) - np.logaddexp.reduce(2 * log_w)))


@dataclass(frozen=True, eq=False)
class Regressed:
    """A density by regression: log q = s, normalised, and f, a little wider, to draw from.

    Attributes:
        surrogate: s, up to its normaliser, in whitened coordinates.
        drawn: f in whitened coordinates.
        mix: the mixture that f widens; where the next fit starts.
        coordinates: theta = mean + root z.
        log_normaliser: log of the integral of exp s, by importance draws from f.
        name: what was fitted.
        error: standard deviation of log q - s over particles held out, in nats.
        num_components: clusters seen.
        refused: fits that were better by that error, but invented mass.
        ess: effective number of f's draws under s, as a fraction.
        gain: log of the mass of s over that of the particles.
        draws: those of the fit itself, num_draws of them; None once saved and loaded.
    """

    surrogate: Surrogate = field(repr=False)
    drawn: Mixture = field(repr=False)
    mix: Mixture = field(repr=False)
    coordinates: Coordinates = field(repr=False)
    log_normaliser: float
    name: str
    error: float
    num_components: int
    refused: int = 0
    ess: float = np.nan
    gain: float = np.nan
    draws: Draws | None = field(default=None, repr=False)

    def log_prob(self, theta: ArrayLike) -> np.ndarray:
        """Normalised log-density log q at theta (n, d): (n,), float64."""
        with jax.enable_x64(True):
            value = log_density(self.surrogate, self._whiten(theta))
        return value - self.log_normaliser - self.coordinates.log_det

    def log_proposal(self, theta: ArrayLike) -> np.ndarray:
        """log f, what draws come from, at theta (n, d): (n,), float64."""
        with jax.enable_x64(True):
            return log_mixture(self.drawn, self._whiten(theta)) - self.coordinates.log_det

    def log_prob_traced(self, theta: Array) -> Array:
        """`log_prob` for use inside traced functions, for (n, d) or (d,), in theta's own dtype.

        It is computed in float64 all the same: a kernel's coefficients cancel, and float32 would
        leave errors of many nats.
        """
        with jax.enable_x64(True):
            value = _traced(self.surrogate, self._whiten_traced(theta)) - self.log_normaliser
            return self._like(value, theta)

    def log_proposal_traced(self, theta: Array) -> Array:
        """`log_proposal` for use inside traced functions."""
        with jax.enable_x64(True):
            drawn = jax.tree.map(jnp.asarray, self.drawn)
            return self._like(_log_mixture(drawn, self._whiten_traced(theta)), theta)

    @property
    def proposal(self) -> Mixture:
        """f as a mixture of theta, in float64."""
        return mapped(self.drawn, self.coordinates.mean, self.coordinates.root)

    def draw(self, key: Array, n: int) -> Draws:
        """n draws from f, scrambled Sobol, with log f and the normalised log q at them."""
        with jax.enable_x64(True):
            return self._coloured(*propose(self.surrogate, self.drawn, n, seed_of(key)))

    def normalise(self, key: Array, num_draws: int) -> "Regressed":
        """The same density with a normaliser from `num_draws` new draws."""
        with jax.enable_x64(True):
            _, log_f, log_s = propose(self.surrogate, self.drawn, num_draws, seed_of(key))
        return replace(self, log_normaliser=log_mean_exp(log_s - log_f), draws=None)

    def pack(self) -> dict[str, np.ndarray]:
        """Everything but the draws as named arrays."""
        parts: dict[str, Any] = {"rule": "regression", **_flat(self.coordinates)}
        for name in ("base", "residual"):
            for key, value in _flat(getattr(self.surrogate, name)).items():
                parts[f"{name}_{key}"] = value
        for name in ("drawn", "mix"):
            parts |= {f"{name}_{k}": v for k, v in _flat(getattr(self, name)).items()}
        parts |= {k: getattr(self.surrogate, k) for k in ("shift", "low", "high")}
        parts |= {k: getattr(self, k) for k in _SCALARS}
        return {k: np.asarray(v) for k, v in parts.items()}

    @staticmethod
    def unpack(parts: Mapping[str, np.ndarray]) -> "Regressed":
        """The inverse of `pack`."""
        take = lambda kind, name: kind._make(parts[f"{name}_{k}"] for k in kind._fields)  # noqa: E731
        if "residual_centres" in parts:
            shape = ridge.Shape(*(float(x) for x in parts["residual_shape"]))
            pair = (parts["residual_centres"], parts["residual_coefficients"])
            residual: ridge.Residual = ridge.Kernel._make((*pair, shape))
        else:
            residual = take(ridge.Quadratic, "residual")
        limits = (float(parts[k]) for k in ("shift", "low", "high"))
        surrogate = Surrogate(take(Mixture, "base"), residual, *limits)
        scalars = {k: parts[k].item() for k in _SCALARS}
        coordinates = Coordinates(*(parts[k] for k in Coordinates._fields))
        mixes = take(Mixture, "drawn"), take(Mixture, "mix")
        return Regressed(surrogate, *mixes, coordinates, **scalars)

    def _whiten(self, theta: ArrayLike) -> np.ndarray:
        mean, _, inverse = self.coordinates
        return (np.asarray(theta, np.float64) - mean) @ inverse.T

    def _whiten_traced(self, theta: Array) -> Array:
        mean, _, inverse = self.coordinates
        wide = jnp.asarray(theta, jnp.float64).reshape(-1, len(mean))
        return (wide - mean) @ jnp.asarray(inverse.T)

    def _like(self, value: Array, theta: Array) -> Array:
        value = value - self.coordinates.log_det
        return value.astype(theta.dtype).reshape(theta.shape[:-1])

    def with_draws(self, z: np.ndarray, log_f: np.ndarray, log_s: np.ndarray) -> "Regressed":
        """The same density with these as its `draws`."""
        return replace(self, draws=self._coloured(z, log_f, log_s))

    def _coloured(self, z: np.ndarray, log_f: np.ndarray, log_s: np.ndarray) -> Draws:
        mean, root, _ = self.coordinates
        log_det = self.coordinates.log_det
        log_q = log_s - self.log_normaliser - log_det
        return Draws._make((mean + z @ root.T, log_f - log_det, log_q))


_SCALARS = (
    "log_normaliser", "name", "error", "num_components", "refused", "ess", "gain",
)  # fmt: skip


def _flat(fields: NamedTuple) -> dict[str, np.ndarray]:
    return {k: np.asarray(v) for k, v in fields._asdict().items()}


def log_mean_exp(log_w: np.ndarray) -> float:
    """log of the mean of exp(log_w)."""
    return float(np.logaddexp.reduce(log_w) - np.log(len(log_w)))
