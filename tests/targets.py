"""Problems whose posterior is known in closed form or from a grid, in float64 NumPy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import digamma, gammaln, logsumexp, polygamma

import pmd


class Truth(NamedTuple):
    """Posterior mean, covariance and log-evidence over flat parameters."""

    mean: np.ndarray
    cov: np.ndarray
    log_evidence: float

    def error(self, mean: Any) -> float:
        """Root mean square of a mean's error, in whitened posterior sds."""
        chol = np.linalg.cholesky(self.cov)
        off = np.atleast_1d(np.asarray(mean, float)) - self.mean
        return float(np.linalg.norm(np.linalg.solve(chol, off)) / np.sqrt(len(off)))


class Target(NamedTuple):
    """A problem, its data, and the truth."""

    problem: pmd.Problem
    data: Any
    truth: Truth


def log_normal(x: Any, sd: Any = 1.0) -> Any:
    """Log-density of N(0, sd^2); works on NumPy and JAX arrays alike."""
    log = np.log if isinstance(sd, float) else jnp.log
    return -0.5 * (x / sd) ** 2 - log(sd) - 0.5 * np.log(2 * np.pi)


def gaussian_mean(rows: int = 300, mean: float = 1.3, noise: float = 2.0, seed: int = 0) -> Target:
    """x ~ N(theta, noise^2), theta ~ N(0, 3^2)."""
    x = mean + noise * np.random.default_rng(seed).standard_normal(rows)
    x = x.astype(np.float32)
    problem = pmd.Problem(
        log_prior=lambda t: log_normal(t, 3.0),
        log_likelihood=lambda t, row: log_normal(row - t, noise),
        sample_prior=lambda key: 3.0 * jax.random.normal(key),
    )
    design = np.ones((rows, 1))
    return Target(problem, x, linear_truth(design, x.astype(float), noise, np.array([3.0])))


def linear_truth(x: np.ndarray, y: np.ndarray, noise: float, prior_sd: np.ndarray) -> Truth:
    """Bayesian linear regression with known noise and independent Gaussian priors of mean zero."""
    cov = np.linalg.inv(x.T @ x / noise**2 + np.diag(prior_sd**-2.0))
    mean = cov @ (x.T @ y) / noise**2
    # log p(y) = log p(y | b) + log p(b) - log p(b | y), at b = the posterior mean
    at_mean = log_normal(y - x @ mean, noise).sum()
    at_mean += (-0.5 * (mean / prior_sd) ** 2 - np.log(prior_sd)).sum()
    return Truth(mean, cov, float(at_mean + 0.5 * np.linalg.slogdet(cov)[1]))


def linear(rows: int = 400, dimension: int = 3, noise: float = 0.8, seed: int = 1) -> Target:
    """y = x b + noise, the noise known; parameters in a dict."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, dimension)).astype(np.float32)
    x[:, 0] += 0.7 * x[:, -1]  # correlated, so that the covariance is no diagonal
    y = (x @ rng.standard_normal(dimension) + noise * rng.standard_normal(rows)).astype(np.float32)
    problem = pmd.Problem(
        log_prior=lambda t: log_normal(t["b"], 2.0).sum(),
        log_likelihood=lambda t, row: log_normal(row[1] - row[0] @ t["b"], noise),
        sample_prior=lambda key: {"b": 2.0 * jax.random.normal(key, (dimension,))},
    )
    truth = linear_truth(x.astype(float), y.astype(float), noise, np.full(dimension, 2.0))
    return Target(problem, (x, y), truth)


def normal_inverse_gamma(rows: int = 500, dimension: int = 2, seed: int = 2) -> Target:
    """Linear regression with unknown noise: s2 ~ InvGamma(a, rate), b | s2 ~ N(0, 4 s2 I).

    Flat parameters are the coefficients and log s2.
    """
    a, rate, wide = 3.0, 2.0, 4.0
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, dimension)).astype(np.float32)
    y = (x @ rng.standard_normal(dimension) + 0.8 * rng.standard_normal(rows)).astype(np.float32)

    def log_prior(t: Any) -> Any:
        gamma = a * np.log(rate) - float(gammaln(a)) - a * t[-1] - rate * jnp.exp(-t[-1])
        return gamma + log_normal(t[:-1], jnp.sqrt(wide) * jnp.exp(0.5 * t[-1])).sum()

    def sample_prior(key: jax.Array) -> jax.Array:
        one, two = jax.random.split(key)
        s2 = rate / jax.random.gamma(one, a)
        b = jnp.sqrt(wide * s2) * jax.random.normal(two, (dimension,))
        return jnp.concatenate([b, jnp.log(s2)[None]])

    def log_likelihood(t: Any, row: Any) -> Any:
        return log_normal(row[1] - row[0] @ t[:-1], jnp.exp(0.5 * t[-1]))

    x64, y64 = x.astype(float), y.astype(float)
    precision = x64.T @ x64 + np.eye(dimension) / wide
    b = np.linalg.solve(precision, x64.T @ y64)
    after, rate_after = a + rows / 2, rate + 0.5 * (y64 @ y64 - b @ precision @ b)
    cov = np.zeros((dimension + 1, dimension + 1))
    # Student t: E s2 = rate / (a - 1); log s2 is minus the log of a gamma variable, independent
    # of b in covariance because b is symmetric given s2.
    cov[:-1, :-1] = rate_after / (after - 1) * np.linalg.inv(precision)
    cov[-1, -1] = polygamma(1, after)
    mean = np.r_[b, np.log(rate_after) - digamma(after)]
    evidence = (
        -0.5 * rows * np.log(2 * np.pi)
        - 0.5 * np.linalg.slogdet(precision)[1]
        - 0.5 * dimension * np.log(wide)
        + a * np.log(rate) - after * np.log(rate_after) + gammaln(after) - gammaln(a)
    )  # fmt: skip
    problem = pmd.Problem(log_prior, log_likelihood, sample_prior)
    return Target(problem, (x, y), Truth(mean, cov, float(evidence)))


def poisson_rate(rows: int = 12, rate: float = 0.4, seed: int = 3) -> Target:
    """Counts with rate exp(theta), exp(theta) ~ Gamma(1.5, 1): a skewed posterior of theta."""
    a, b = 1.5, 1.0
    counts = np.random.default_rng(seed).poisson(rate, rows).astype(np.float32)
    problem = pmd.Problem(
        log_prior=lambda t: a * t - b * jnp.exp(t) - float(gammaln(a)) + a * np.log(b),
        log_likelihood=lambda t, k: k * t - jnp.exp(t) - jax.scipy.special.gammaln(k + 1),
        sample_prior=lambda key: jnp.log(jax.random.gamma(key, a) / b),
    )
    total, after = float(counts.sum()), a + float(counts.sum())
    evidence = (
        a * np.log(b) - gammaln(a) + gammaln(after) - after * np.log(b + rows)
        - gammaln(counts + 1.0).sum()
    )  # fmt: skip
    mean = np.array([digamma(after) - np.log(b + rows)])
    assert total > 0
    return Target(problem, counts, Truth(mean, np.array([[polygamma(1, after)]]), float(evidence)))


class Grid(NamedTuple):
    """A posterior on a grid of two parameters."""

    points: np.ndarray  # (n, 2)
    weights: np.ndarray  # (n,)
    log_evidence: float
    cell: float

    @property
    def mean(self) -> np.ndarray:
        """Posterior mean."""
        return self.weights @ self.points

    @property
    def sd(self) -> np.ndarray:
        """Posterior standard deviations."""
        return np.sqrt(self.weights @ (self.points - self.mean) ** 2)

    @property
    def first_mode(self) -> float:
        """Mass where the second parameter is negative; next to nothing lies where it is zero."""
        return float(self.weights @ (self.points[:, 1] < 0))


def mixture(
    rows: int = 400, share: float = 0.3, sd: float = 2.0, seed: int = 4, side: int = 401
) -> tuple[pmd.Problem, np.ndarray, Grid]:
    """The paper's mixture, x ~ (1-p) N(t0, sd^2) + p N(t0 + t1, sd^2); asymmetric by default."""
    rng = np.random.default_rng(seed)
    second = rng.uniform(size=rows) < share
    x = (1.0 - 2.0 * second + sd * rng.standard_normal(rows)).astype(np.float32)
    one, two = float(np.log(1 - share)), float(np.log(share))

    def log_likelihood(t: Any, row: Any) -> Any:
        return jnp.logaddexp(one + log_normal(row - t[0], sd), two + log_normal(row - t.sum(), sd))

    problem = pmd.Problem(
        log_prior=lambda t: log_normal(t, 1.0).sum(),
        log_likelihood=log_likelihood,
        sample_prior=lambda key: jax.random.normal(key, (2,)),
    )
    axis = np.linspace(-4, 4, side)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    sums = log_normal(points, 1.0).sum(1)
    means = points[:, 0], points.sum(1)
    for row in x.astype(float):
        sums += np.logaddexp(
            *(p + log_normal(row - m, sd) for p, m in zip((one, two), means, strict=True))
        )
    cell = (axis[1] - axis[0]) ** 2
    total = logsumexp(sums)
    return problem, x, Grid(points, np.exp(sums - total), float(total + np.log(cell)), cell)
