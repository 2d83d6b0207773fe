"""Posteriors with closed forms, made by hand: what the tests of results work on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import multivariate_normal

from pmd.certificate import Certificate, pareto_k
from pmd.densities.mixture import Draws, Mixture, log_prob, sample
from pmd.posterior import Posterior
from pmd.structure import Structure


class Known(NamedTuple):
    """A Gaussian mixture as a fitted density: draws from one a little wider than it means."""

    mixture: Mixture
    error: float = 0.0
    name: str = "known"
    wider: float = 1.1

    @property
    def num_components(self) -> int:
        return len(self.mixture.log_pi)

    def draw(self, key: jax.Array, n: int) -> Draws:
        wide = self.mixture._replace(chol=self.wider * self.mixture.chol)
        theta = sample(key, wide, n)
        return Draws(theta, log_prob(wide, theta), log_prob(self.mixture, theta))

    def log_prob(self, theta: Any) -> jax.Array:
        return log_prob(self.mixture, jnp.asarray(theta))


def gaussians(
    means: Any, covariances: Any, shares: Any = None, error: float = 0.0, wider: float = 1.1
) -> Known:
    """A mixture of Gaussians as a fitted density."""
    means = np.atleast_2d(np.asarray(means, float))
    shares = np.full(len(means), 1 / len(means)) if shares is None else np.asarray(shares)
    chol = np.linalg.cholesky(
        np.broadcast_to(covariances, (len(means), *np.shape(covariances)[-2:]))
    )
    return Known(Mixture(np.log(shares), means, chol), error, wider=wider)


def log_mixture(theta: np.ndarray, means: Any, covariances: Any, shares: Any) -> np.ndarray:
    """Log-density of a Gaussian mixture, by SciPy."""
    parts = [
        np.log(p) + multivariate_normal(m, c).logpdf(theta)
        for m, c, p in zip(means, covariances, shares, strict=True)
    ]
    return np.logaddexp.reduce(parts, axis=0)


def weighted(
    theta: np.ndarray,
    log_q: np.ndarray,
    log_p0: np.ndarray,
    density: Any = None,
    structure: Structure | None = None,
    **parts: Any,
) -> Posterior:
    """A posterior of weighted particles."""
    if structure is None:
        structure = Structure.of(jax.ShapeDtypeStruct(theta.shape[1:], jnp.float32))
    k = pareto_k(log_q - log_p0)[0]
    settings = {
        "structure": structure,
        "log_evidence": -12.5,
        "log_evidence_error": 0.01,
        "certificate": certificate(dimension=theta.shape[1], pareto_k=k, num_particles=len(theta)),
        "history": [{"kind": "step", "ess": 0.5}, {"kind": "move", "audit": float("nan")}],
        "evaluations": 5120.0,
        "settings": {"plan": "5 passes, batches of 10 to 1000", "seed": 0},
    } | parts
    return Posterior(theta=theta, log_q=log_q, log_p0=log_p0, density=density, **settings)


def certificate(**changes: Any) -> Certificate:
    """A certificate of a good run, but for the changes."""
    good: dict[str, Any] = {
        "pareto_k": -0.3, "ess": 1200.0, "num_particles": 1500, "dimension": 2,
        "log_evidence": -2210.3, "log_evidence_error": 0.002, "minibatch_noise": 0.0,
        "fit_error": 0.02, "exact": "auto", "exact_last": True, "evaluations": 5021.0,
        "worst_kept_error": 0.05, "worst_audit": 0.1, "kept": 5, "reweighed": 2, "guarded": 1,
    }  # fmt: skip
    return Certificate(**(good | changes))


MEAN = np.array([1.0, -2.0])
COV = np.array([[1.0, 0.6], [0.6, 2.0]])


def gaussian_posterior(
    m: int = 2000, seed: int = 0, density: Any = None, wide: float = 2.0, **parts: Any
) -> Posterior:
    """N(MEAN, COV) by particles from a Gaussian with `wide` times its covariance."""
    rng = np.random.default_rng(seed)
    theta = rng.multivariate_normal(MEAN, wide * COV, m)
    exact = multivariate_normal(MEAN, COV).logpdf(theta)
    return weighted(
        theta, exact, multivariate_normal(MEAN, wide * COV).logpdf(theta), density, **parts
    )
