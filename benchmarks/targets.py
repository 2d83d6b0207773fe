"""Ten posteriors, each with new data for every data seed.

A `Target` holds one `pmd.Problem`, so that runs on many data sets share its compiled programs,
and says how its reference is made (`benchmarks.references`).  Parameters are vectors.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

import pmd
from benchmarks.references import Reference, closed_form, grid, importance, nuts

PyTree = Any
Theta = Any  # a vector of parameters, in JAX or NumPy
HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))


class Drawn(NamedTuple):
    """Rows, and parameters near the best mode to start a search from."""

    rows: PyTree
    near: np.ndarray


@dataclass(frozen=True)
class Target:
    """A posterior to be found.

    Attributes:
        draw: rows and the parameters behind them, from a NumPy generator.
        reference: what the posterior is: `reference(target, drawn)`.
        options: what `pmd.fit` is given beside problem and rows.
        modes: from parameters to an indicator of the mode they belong to.
        sort: from parameters to the ones of the same meaning in the first mode, and
        permute: from those to the ones in another, given an order of the three parts.
        axis: half the width of the square that holds all mass, and points a side (2 dimensions).
        more: further figures of a result.
    """

    name: str
    problem: pmd.Problem
    draw: Callable[[np.random.Generator], Drawn]
    reference: Callable[["Target", Drawn], Reference]
    options: dict[str, Any] = field(default_factory=dict)
    modes: Callable[[Theta], Any] | None = None
    sort: Callable[[Theta], Any] | None = None
    permute: Callable[[Theta, Any], Any] | None = None
    axis: tuple[float, int] | None = None
    more: Callable[[pmd.Posterior], dict[str, float]] | None = None

    def data(self, seed: int) -> Drawn:
        """The data set of a number, in single precision."""
        random = np.random.default_rng([crc32(self.name.encode()), seed])
        rows, near = self.draw(random)
        return Drawn(jax.tree.map(lambda a: np.asarray(a, np.float32), rows), near)


def log_normal(x: Any, sd: Any = 1.0) -> Any:
    """Log-density of N(0, sd^2)."""
    log_sd = jnp.log(sd) if isinstance(sd, jax.Array) else np.log(sd)
    return -0.5 * (x / sd) ** 2 - log_sd - HALF_LOG_2PI


def problem(log_likelihood: Callable[..., Any], scale: list[float]) -> pmd.Problem:
    """A likelihood with independent Gaussian priors of mean zero.

    Constants are JAX arrays made in the functions: these are traced in both precisions, and JAX
    confuses the two where the same NumPy array is a constant of both.
    """
    return pmd.Problem(
        lambda t: log_normal(t, jnp.asarray(scale)).sum(),
        log_likelihood,
        lambda key: jnp.asarray(scale) * jax.random.normal(key, (len(scale),)),
    )


def design(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A constant and standard normal covariates."""
    return np.c_[np.ones(rows), random.standard_normal((rows, columns - 1))]


# ---------------------------------------------------------------- two dimensions, a grid
def mixture(name: str, share: float, sd: float) -> Target:
    """The paper's: x ~ share N(t0, sd^2) + (1 - share) N(t0 + t1, sd^2), two modes."""
    logs = float(np.log(share)), float(np.log1p(-share))

    def draw(random: np.random.Generator) -> Drawn:
        first = random.random(1000) < share
        return Drawn(np.where(first, 1.0, -1.0) + sd * random.standard_normal(1000), np.zeros(2))

    def log_likelihood(t: Theta, x: Any) -> Any:
        one, two = log_normal(x - t[0], sd), log_normal(x - t[0] - t[1], sd)
        return jnp.logaddexp(logs[0] + one, logs[1] + two)

    return Target(
        name, problem(log_likelihood, [1.0, 1.0]), draw, grid, {"num_particles": 1500},
        modes=lambda t: jnp.stack([t[1] < 0, t[1] >= 0]).astype(t.dtype), axis=(4.5, 241),
    )  # fmt: skip


def banana() -> Target:
    """x ~ N(t0 + t1^2, 2): a ridge bent into a parabola."""
    sd = float(np.sqrt(2))

    def draw(random: np.random.Generator) -> Drawn:
        return Drawn(1.3 + sd * random.standard_normal(500), np.zeros(2))

    likelihood = problem(lambda t, x: log_normal(x - t[0] - t[1] ** 2, sd), [1.0, 1.0])
    return Target("banana", likelihood, draw, grid, axis=(5.0, 321))


# ---------------------------------------------------------------- six modes
ORDERS = np.array(list(itertools.permutations(range(3))))
CENTRES = np.array([-3.0, 0.0, 3.0])


def order_of_means(t: Theta) -> Any:
    """Which of the six orders the first three parameters have, as an indicator."""
    return (jnp.argsort(t[:3]) == jnp.asarray(ORDERS.tolist())).all(1).astype(t.dtype)


def three_means() -> Target:
    """x ~ 1/3 sum_k N(t_k, 1): the means of three equal parts, in any order."""

    def draw(random: np.random.Generator) -> Drawn:
        return Drawn(CENTRES[random.integers(0, 3, 600)] + random.standard_normal(600), CENTRES)

    def log_likelihood(t: Theta, x: Any) -> Any:
        return jax.nn.logsumexp(log_normal(x - t)) - float(np.log(3))

    return Target(
        "means", problem(log_likelihood, [4.0] * 3), draw, importance, modes=order_of_means,
        sort=jnp.sort, permute=lambda t, order: t[order],
    )  # fmt: skip


def three_components() -> Target:
    """Three parts with unknown means, log sds and weights (two logits against the third)."""
    sds, weights = np.array([0.7, 1.0, 1.3]), np.array([0.3, 0.4, 0.3])

    def draw(random: np.random.Generator) -> Drawn:
        part = random.choice(3, 600, p=weights)
        x = CENTRES[part] + sds[part] * random.standard_normal(600)
        return Drawn(x, np.r_[CENTRES, np.log(sds), np.log(weights[:2] / weights[2])])

    def logits(t: Theta) -> Any:
        return jnp.concatenate([t[6:], jnp.zeros(1, t.dtype)])

    def log_prior(t: Theta) -> Any:  # Dirichlet(2, 2, 2) on the weights
        weights = 2 * jax.nn.log_softmax(logits(t)).sum() + float(np.log(120))
        return log_normal(t[:3], 4.0).sum() + log_normal(t[3:6], 0.5).sum() + weights

    def sample_prior(key: Any) -> Any:
        a, b, c = jax.random.split(key, 3)
        w = jnp.log(jax.random.dirichlet(c, jnp.full(3, 2.0)))
        means, log_sds = 4 * jax.random.normal(a, (3,)), 0.5 * jax.random.normal(b, (3,))
        return jnp.concatenate([means, log_sds, w[:2] - w[2]])

    def log_likelihood(t: Theta, x: Any) -> Any:
        parts = log_normal(x - t[:3], jnp.exp(t[3:6]))
        return jax.nn.logsumexp(jax.nn.log_softmax(logits(t)) + parts)

    def permute(t: Theta, order: Any) -> Any:
        w = logits(t)[order]
        return jnp.concatenate([t[:3][order], t[3:6][order], w[:2] - w[2]])

    return Target(
        "components", pmd.Problem(log_prior, log_likelihood, sample_prior), draw, importance,
        modes=order_of_means, sort=lambda t: permute(t, jnp.argsort(t[:3])), permute=permute,
    )  # fmt: skip


# ---------------------------------------------------------------- regressions
def linear() -> Target:
    """y = x b + noise of unknown size: five coefficients and a log sd."""

    def draw(random: np.random.Generator) -> Drawn:
        x, b = design(random, 1000, 5), random.standard_normal(5)
        y = x @ b + 0.8 * random.standard_normal(1000)
        return Drawn((x, y), np.r_[b, np.log(0.8)])

    def log_likelihood(t: Theta, row: Any) -> Any:
        return log_normal(row[1] - row[0] @ t[:5], jnp.exp(t[5]))

    return Target("linear", problem(log_likelihood, [2.0] * 5 + [1.0]), draw, closed_form("linear"))


def student() -> Target:
    """y = x b + Student-t noise: ten coefficients, a log scale, the log of freedom / 5."""

    def draw(random: np.random.Generator) -> Drawn:
        x, b = design(random, 2000, 10), random.standard_normal(10)
        y = x @ b + 0.5 * random.standard_t(4, 2000)
        return Drawn((x, y), np.r_[b, np.log(0.5), np.log(4 / 5)])

    def log_likelihood(t: Theta, row: Any) -> Any:
        freedom = 5 * jnp.exp(t[11])
        residual = (row[1] - row[0] @ t[:10]) * jnp.exp(-t[10])
        constant = (
            gammaln((freedom + 1) / 2) - gammaln(freedom / 2) - 0.5 * jnp.log(freedom * jnp.pi)
        )
        return constant - t[10] - (freedom + 1) / 2 * jnp.log1p(residual**2 / freedom)

    scale = [3.0] * 10 + [1.0] * 2
    return Target("student", problem(log_likelihood, scale), draw, importance)


def poisson() -> Target:
    """Counts with log-rate x b: twenty coefficients."""

    def draw(random: np.random.Generator) -> Drawn:
        x, b = design(random, 5000, 20), 0.3 * random.standard_normal(20)
        return Drawn((x, random.poisson(np.exp(x @ b))), b)

    def log_likelihood(t: Theta, row: Any) -> Any:
        log_rate = row[0] @ t
        return row[1] * log_rate - jnp.exp(jnp.minimum(log_rate, 50.0)) - gammaln(row[1] + 1)

    return Target("poisson", problem(log_likelihood, [1.0] * 20), draw, importance)


def funnel() -> Target:
    """Eight groups: mean, log sd of the effects, standardised effects, log noise."""

    def draw(random: np.random.Generator) -> Drawn:
        group = np.repeat(np.arange(8), 50)
        y = (1 + 0.6 * random.standard_normal(8))[group] + 1.5 * random.standard_normal(400)
        return Drawn((np.eye(8)[group], y), np.r_[1.0, -0.5, np.zeros(8), 0.4])

    def log_likelihood(t: Theta, row: Any) -> Any:
        mean = t[0] + jnp.exp(t[1]) * (row[0] @ t[2:10])
        return log_normal(row[1] - mean, jnp.exp(t[10]))

    scale = [3.0] + [1.0] * 10
    return Target("funnel", problem(log_likelihood, scale), draw, closed_form("funnel"))


class Digits(NamedTuple):
    """MNIST's 8s (+1) and 6s (-1), by their first 50 principal components."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@lru_cache
def digits() -> Digits:
    """From `mnist.npz` in the folder that PMD_DATA names."""
    file = np.load(Path(os.environ["PMD_DATA"]) / "mnist.npz")

    def pick(split: str) -> tuple[np.ndarray, np.ndarray]:
        labels = file[f"{split}_labels"]
        chosen = np.isin(labels, (6, 8))
        images = file[f"{split}_images"][chosen].reshape(-1, 784) / 255.0
        return images, np.where(labels[chosen] == 8, 1.0, -1.0)

    (x, y), (x_test, y_test) = pick("train"), pick("test")
    centre = x.mean(0)
    basis = np.linalg.eigh((x - centre).T @ (x - centre))[1][:, ::-1][:, :50]
    basis = basis * np.sign(basis[np.abs(basis).argmax(0), np.arange(50)])  # whatever LAPACK says
    return Digits((x - centre) @ basis, y, (x_test - centre) @ basis, y_test)


def mnist() -> Target:
    """Logistic regression in 50 dimensions; the data are the same whatever the data seed."""

    def draw(random: np.random.Generator) -> Drawn:
        return Drawn((digits().x, digits().y), np.zeros(50))

    def test_error(posterior: pmd.Posterior) -> dict[str, float]:
        x = np.asarray(digits().x_test, np.float32)
        p = np.asarray(posterior.expect(lambda t: jax.nn.sigmoid(x @ t)))
        return {"test_error": float(np.mean((p > 0.5) != (digits().y_test > 0)))}

    return Target(
        "mnist",
        problem(lambda t, row: -jnp.logaddexp(0.0, -row[1] * (row[0] @ t)), [1.0] * 50),
        draw, nuts, {"num_particles": 4000, "passes": 5}, more=test_error,
    )  # fmt: skip


MAKERS: dict[str, Callable[[], Target]] = {
    "mixture": lambda: mixture("mixture", 0.5, 2.5),
    "asymmetric": lambda: mixture("asymmetric", 0.3, 2.0),
    "banana": banana,
    "means": three_means,
    "linear": linear,
    "student": student,
    "poisson": poisson,
    "components": three_components,
    "funnel": funnel,
    "mnist": mnist,
}


@lru_cache
def target(name: str) -> Target:
    """One of the ten, made once, so that its compiled programs are shared."""
    return MAKERS[name]()
