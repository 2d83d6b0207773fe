"""What the posteriors are: on a grid, by quadrature, by importance sampling, or by a long NUTS run.

All in float64.  The dear ones are kept in `benchmarks/results/references`, by a hash of the data.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import gammaln, logsumexp

import pmd
from pmd.experiments.grid import Grid, known

if TYPE_CHECKING:
    from benchmarks.targets import Drawn, Target

PyTree = Any
FOLDER = Path(__file__).parent / "results" / "references"
FREEDOM = 7.0  # of the multivariate t that importance sampling draws from
DRAWS = (20_000, 20_000, 100_000)  # two rounds to adapt its moments, and the last
NUTS_WARMUP, NUTS_DRAWS = 500, 10_000


class Reference(NamedTuple):
    """A posterior's moments, evidence, and where there are several modes, their masses.

    `sorted_mean` and `sorted_sd` are those of parameters sorted into the first mode; `log_density`
    is normalised, at the points of a grid.  What does not apply is empty.
    """

    mean: np.ndarray
    cov: np.ndarray
    log_evidence: float
    note: str
    masses: np.ndarray = np.zeros(0)
    sorted_mean: np.ndarray = np.zeros(0)
    sorted_sd: np.ndarray = np.zeros(0)
    log_density: np.ndarray = np.zeros(0)

    @property
    def sd(self) -> np.ndarray:
        """Posterior standard deviations."""
        return np.sqrt(np.diag(self.cov))


def moments(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean and covariance."""
    mean = w @ x
    return mean, (x - mean).T @ ((x - mean) * w[:, None])


def normalised(log_w: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights that sum to one, and the log of what they summed to."""
    total = float(np.asarray(logsumexp(log_w)))
    return np.exp(log_w - total), total


# ---------------------------------------------------------------- the density itself
class Compiled(NamedTuple):
    """The unnormalised log-posterior of a problem, for any data of the same shapes."""

    many: Callable[..., Any]
    gradient: Callable[..., Any]
    hessian: Callable[..., Any]


@lru_cache
def compiled(problem: pmd.Problem) -> Compiled:
    """log p(theta) + sum_n log p(x_n | theta), its gradient and its Hessian."""
    assert problem.log_likelihood is not None
    by_row: Callable[..., Any] = problem.log_likelihood

    def log_joint(t: Any, rows: PyTree) -> Any:
        return problem.log_prior(t) + jax.vmap(lambda row: by_row(t, row))(rows).sum()

    def many(points: Any, rows: PyTree) -> Any:
        return jax.lax.map(lambda t: log_joint(t, rows), points, batch_size=256)

    return Compiled(jax.jit(many), jax.jit(jax.grad(log_joint)), jax.jit(jax.hessian(log_joint)))


def widened(rows: PyTree) -> PyTree:
    """Rows in double precision."""
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), rows)


def mode_near(functions: Compiled, rows: PyTree, start: np.ndarray) -> tuple[np.ndarray, ...]:
    """The mode by Newton's method with short steps, and minus the inverse Hessian there."""
    at = np.array(start, float)
    for _ in range(60):
        step = np.linalg.solve(functions.hessian(at, rows), functions.gradient(at, rows))
        size = np.abs(step).max()
        at = at - step * min(1.0, 0.5 / (size + 1e-300))
        if size < 1e-10:
            break
    return at, np.linalg.inv(-np.asarray(functions.hessian(at, rows)))


# ---------------------------------------------------------------- two dimensions
def grid(target: "Target", drawn: "Drawn") -> Reference:
    """Sums over a fine grid."""
    assert target.axis is not None
    square = Grid.square(*target.axis)
    with jax.enable_x64(True):
        points = jnp.asarray(square.points)
        log_joint = np.asarray(compiled(target.problem).many(points, widened(drawn.rows)))
        masses = np.zeros(0)
        truth = known(square, log_joint)
        w = np.exp(truth.log_density) * square.cell
        if target.modes is not None:
            masses = w @ np.asarray(jax.vmap(target.modes)(points))
    note = f"grid of {target.axis[1]} x {target.axis[1]}"
    return Reference(
        *moments(square.points, w), truth.log_normaliser, note, masses,
        log_density=truth.log_density,
    )  # fmt: skip


# ---------------------------------------------------------------- Gaussian given one or two numbers
def closed_form(which: str) -> Callable[["Target", "Drawn"], Reference]:
    """Posteriors that are Gaussian given some parameters; a quadrature over those."""
    return {"linear": _linear, "funnel": _funnel}[which]


def _linear(target: "Target", drawn: "Drawn") -> Reference:
    """b ~ N(0, 4 I), log sd ~ N(0, 1): b is Gaussian given the sd."""
    x, y = (np.asarray(a, float) for a in drawn.rows)
    values, vectors = np.linalg.eigh(x.T @ x)
    along, n = vectors.T @ (x.T @ y), len(y)

    def given(log_sd: np.ndarray) -> tuple[np.ndarray, ...]:
        s2 = np.exp(2 * log_sd)[:, None]
        precision = values / s2 + 1 / 4
        mean = along / s2 / precision
        fit = y @ y / s2[:, 0] - (mean * along / s2).sum(1)
        log_det = np.log(4 * precision).sum(1) + n * np.log(2 * np.pi * s2[:, 0])
        return -0.5 * (fit + log_det + log_sd**2 + np.log(2 * np.pi)), mean, 1 / precision

    axis = np.linspace(-4, 4, 4001)
    best = axis[given(axis)[0].argmax()]
    axis = np.linspace(best - 0.5, best + 0.5, 4001)
    log_joint, mean, variance = given(axis)
    w, total = normalised(log_joint)
    evidence = total + float(np.log(axis[1] - axis[0]))
    both = np.c_[mean @ vectors.T, axis]
    centre, cov = moments(both, w)
    cov[:5, :5] += (vectors * (w @ variance)) @ vectors.T
    return Reference(centre, cov, evidence, "quadrature over the log sd")


def _funnel(target: "Target", drawn: "Drawn") -> Reference:
    """Mean and effects are Gaussian given the two log sds."""
    one_hot, y = (np.asarray(a, float) for a in drawn.rows)
    count, total = one_hot.sum(0), one_hot.T @ y
    residual = y - one_hot @ (total / count)
    noise = 0.5 * np.log(residual @ residual / len(y))
    tau, sigma = np.linspace(-8, 4, 361), np.linspace(noise - 0.4, noise + 0.5, 181)
    pairs = np.stack(np.meshgrid(tau, sigma, indexing="ij"), -1).reshape(-1, 2)
    scale, s2 = np.exp(pairs[:, 0])[:, None], np.exp(2 * pairs[:, 1])[:, None]
    # the mean with variance 9 first, then eight effects with variance 1
    precision = np.zeros((len(pairs), 9, 9))
    precision[:, 0, 0] = len(y) / s2[:, 0] + 1 / 9
    precision[:, 0, 1:] = precision[:, 1:, 0] = count * scale / s2
    precision[:, range(1, 9), range(1, 9)] = count * scale**2 / s2 + 1
    along = np.concatenate([np.broadcast_to(y.sum(), s2.shape), total * scale], axis=1) / s2
    cov = np.linalg.inv(precision)
    mean = np.einsum("nij,nj->ni", cov, along)
    fit = y @ y / s2[:, 0] - (mean * along).sum(1)
    log_det = np.linalg.slogdet(precision)[1] + np.log(9) + len(y) * np.log(2 * np.pi * s2[:, 0])
    log_joint = -0.5 * (fit + log_det + (pairs**2).sum(1)) - np.log(2 * np.pi)
    w, total = normalised(log_joint)
    evidence = total + float(np.log((tau[1] - tau[0]) * (sigma[1] - sigma[0])))
    both = np.c_[mean[:, 0], pairs[:, 0], mean[:, 1:], pairs[:, 1]]
    centre, total_cov = moments(both, w)
    places = np.r_[0, 2:10]
    total_cov[np.ix_(places, places)] += np.einsum("n,nij->ij", w, cov)
    return Reference(centre, total_cov, evidence, "quadrature over the two log sds")


# ---------------------------------------------------------------- sampling
def kept(name: str, drawn: "Drawn", make: Callable[[], Reference]) -> Reference:
    """The reference on disk, made first if there is none."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(drawn.rows):
        digest.update(np.ascontiguousarray(np.round(leaf, 4)).tobytes())
    path = FOLDER / f"{name}-{digest.hexdigest()[:16]}.npz"
    if path.exists():
        with np.load(path) as file:
            found = {key: file[key] for key in file.files}
        return Reference(**found)._replace(
            log_evidence=float(found["log_evidence"]), note=str(found["note"])
        )
    made = make()
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez(path, **made._asdict())
    return made


class Weighted(NamedTuple):
    """Draws with normalised weights, and the evidence they give."""

    theta: np.ndarray
    weight: np.ndarray
    log_evidence: float


def draw_t(
    random: np.random.Generator, mean: np.ndarray, cov: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws of a multivariate t, and their log-density."""
    d, chol = len(mean), np.linalg.cholesky(cov)
    z = random.standard_normal((n, d)) / np.sqrt(random.chisquare(FREEDOM, (n, 1)) / FREEDOM)
    constant = gammaln((FREEDOM + d) / 2) - gammaln(FREEDOM / 2) - d / 2 * np.log(FREEDOM * np.pi)
    tail = (FREEDOM + d) / 2 * np.log1p((z**2).sum(1) / FREEDOM)
    return mean + z @ chol.T, constant - np.log(np.diag(chol)).sum() - tail


def sampled(target: "Target", drawn: "Drawn", seed: int = 0) -> Weighted:
    """Importance sampling from a multivariate t around the mode; where the parts of a parameter
    can be permuted, in the first mode alone, a sixth of everything."""
    random = np.random.default_rng(seed)
    with jax.enable_x64(True):
        rows, functions = widened(drawn.rows), compiled(target.problem)
        mean, cov = mode_near(functions, rows, drawn.near)
        theta, weight, total = np.zeros((0, len(mean))), np.zeros(0), 0.0
        for n in DRAWS:
            theta, log_t = draw_t(random, mean, cov, n)
            log_w = np.asarray(functions.many(jnp.asarray(theta), rows)) - log_t
            if target.permute is not None:
                log_w = np.where((np.diff(theta[:, :3]) > 0).all(1), log_w, -np.inf)
            weight, total = normalised(log_w)
            mean, cov = moments(theta, weight)
    modes = 6 if target.permute is not None else 1
    return Weighted(theta, weight, total + float(np.log(modes / len(theta))))


def importance(target: "Target", drawn: "Drawn") -> Reference:
    """Moments and evidence by importance sampling; modes are permutations of the first."""
    return kept(target.name, drawn, partial(_importance, target, drawn))


def _importance(target: "Target", drawn: "Drawn") -> Reference:
    found = sampled(target, drawn)
    mean, cov = moments(found.theta, found.weight)
    note = f"importance sampling, {1 / (found.weight**2).sum():.0f} effective draws"
    if target.permute is None:
        return Reference(mean, cov, found.log_evidence, note)
    from benchmarks.targets import ORDERS

    turn = jax.vmap(target.permute, (0, None))
    with jax.enable_x64(True):
        theta = np.concatenate([turn(jnp.asarray(found.theta), order) for order in ORDERS])
    everywhere = moments(theta, np.tile(found.weight, len(ORDERS)) / len(ORDERS))
    masses = np.full(len(ORDERS), 1 / len(ORDERS))
    sd = np.sqrt(np.diag(cov))
    return Reference(*everywhere, found.log_evidence, note, masses, mean, sd)


def nuts(target: "Target", drawn: "Drawn") -> Reference:
    """Moments by a long NUTS run, evidence by importance sampling."""
    return kept(target.name, drawn, partial(_nuts, target, drawn))


def nuts_draws(target: "Target", drawn: "Drawn", draws: int = NUTS_DRAWS) -> np.ndarray:
    """One chain of NUTS, in coordinates whitened at the mode."""
    from numpyro.infer import MCMC, NUTS

    problem = target.problem
    with jax.enable_x64(True):
        rows, functions = widened(drawn.rows), compiled(problem)
        mean, cov = mode_near(functions, rows, drawn.near)
        centre, chol = jnp.asarray(mean), jnp.asarray(np.linalg.cholesky(cov))
        by_row: Any = problem.log_likelihood

        def potential(z: Any) -> Any:
            t = centre + chol @ z
            return -problem.log_prior(t) - jax.vmap(lambda row: by_row(t, row))(rows).sum()

        kernel = NUTS(potential_fn=potential, target_accept_prob=0.9)
        chain = MCMC(kernel, num_warmup=NUTS_WARMUP, num_samples=draws, progress_bar=False)
        chain.run(jax.random.key(0), init_params=jnp.zeros(len(mean)))
        return np.asarray(centre + chain.get_samples() @ chol.T)


def _nuts(target: "Target", drawn: "Drawn") -> Reference:
    theta = nuts_draws(target, drawn)
    found = sampled(target, drawn)
    note = (
        f"NUTS, {len(theta)} draws; evidence by importance sampling, "
        f"{1 / (found.weight**2).sum():.0f} effective draws"
    )
    equal = np.full(len(theta), 1 / len(theta))
    return Reference(*moments(theta, equal), found.log_evidence, note)
