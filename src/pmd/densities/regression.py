"""Densities by regression: the particles know log q where they are, so regress it.

A move fits s = log base + r to log q at the particles, by ridge regression in whitened
coordinates, and draws from f, a Gaussian mixture a little wider than s. Read in this order:
`whitened.Cloud`, the particles; `base.fit_base` and `base.sharpen`; here `candidates`, the
regressions on top; `draw_from`; and `Regression.fit`, which refuses what invents mass.

Related: Salimans and Knowles (2013), stochastic linear regression for variational posteriors;
Acerbi (2018), VBMC, a surrogate of the log-joint. Here PMD regresses its own iterate.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from pmd.densities import mixture, ridge
from pmd.densities.base import carried, fit_base, sharpen, standard
from pmd.densities.mixture import Mixture
from pmd.densities.surrogate import (
    Regressed,
    Surrogate,
    ess,
    evaluate,
    few_sizes,
    gaussian,
    log_mean_exp,
    log_mixture,
    propose,
    seed_of,
)
from pmd.densities.whitened import Cloud, summary, whiten

ENOUGH = 0.001  # nats: held-out error below which no other regression is tried
GOOD = 0.1  # nats, times sqrt(d): held-out error below which no mixture is tried as base
MOST = 2500  # particles behind a kernel regression


class Trial(NamedTuple):
    """A base with a regression on top, and its error on held-out particles."""

    error: float
    name: str
    base: Mixture
    log_base: np.ndarray
    fit: Callable[[ridge.Rows], ridge.Residual]
    residual: ridge.Residual
    shift: float


def single_base(cloud: Cloud) -> list[tuple[str, Callable]]:
    """Regressions worth trying on one Gaussian."""
    found: list[tuple[str, Callable]] = [("quadratic", ridge.fit_quadratic)]
    if not cloud.big:
        found += [("quadratic+poly4", kernel(higher=0.003))]
        found += [(f"poly4+rbf{x}", kernel(bump=1.0, length=x)) for x in (1.5, 0.6)]
    return found


def mixture_base(name: str, cloud: Cloud) -> list[tuple[str, Callable]]:
    """Regressions worth trying on a mixture: what is left is local."""
    if cloud.big:
        return []
    local = partial(kernel, slope=0.0, higher=0.0, bump=1.0)
    return [(f"{name}+rbf{x}", local(length=x)) for x in (0.3, 0.8, 2.0)]


def kernel(**shape: float) -> Callable[[ridge.Rows], ridge.Residual]:
    """Kernel ridge regression with a kernel of that shape."""
    return partial(ridge.fit_kernel, shape=ridge.Shape(**shape))


def no_residual(rows: ridge.Rows) -> ridge.Residual:
    """No regression: the base alone."""
    return ridge.zero(rows.z.shape[1])


def rows_of(cloud: Cloud, log_base: np.ndarray, index: np.ndarray) -> tuple[ridge.Rows, float]:
    """What a regression fits: log q - log base, less a shift, and how well it has to.

    The noise is a thousandth of the scale near the top and 5 % of the excess depth below.
    """
    y, depth = cloud.log_q[index] - log_base[index], -cloud.log_q[index]
    near = y[depth < cloud.core] if (depth < cloud.core).any() else y
    shift, scale = float(np.median(near)), max(float(np.var(near)), 0.01)
    noise = 1e-6 * max(scale, 1.0) + (0.05 * np.maximum(depth - cloud.core, 0)) ** 2
    return ridge.rows_from(cloud.z[index], y - shift, noise, scale), shift


class Split(NamedTuple):
    """Particles to fit to, particles to judge by, and what each of these counts."""

    train: np.ndarray
    hold: np.ndarray
    weight: np.ndarray


def hold_out(cloud: Cloud, rng: np.random.Generator) -> Split:
    """A random split; half of the judges' weight is the posterior's, half is even near the top."""
    kept, p = rng.permutation(cloud.kept), cloud.coefficients
    share, most = (0.1, max(2250, 2.7 * p)) if cloud.big else (0.2, max(720, 3.2 * p))
    size = max(1, int(min((1 - share) * len(kept), most)))
    train, hold = kept[:size], kept[size : size + 512]
    near = (-cloud.log_q[hold] < cloud.core).astype(float)
    parts = [v / v.sum() for v in (cloud.weight[hold], near) if v.sum() > 0]
    weight = np.mean(parts, axis=0) if parts else np.full(len(hold), 1 / max(len(hold), 1))
    return Split(train, hold, weight)


def spread(error: np.ndarray, weight: np.ndarray) -> float:
    """Weighted standard deviation, infinite where it cannot be had."""
    if not len(error) or not np.isfinite(error).all():
        return np.inf
    return float(np.sqrt(weight @ (error - weight @ error) ** 2))


def attempt(
    cloud: Cloud,
    split: Split,
    base: Mixture,
    log_base: np.ndarray,
    regressions: list[tuple[str, Callable]],
) -> list[Trial]:
    """Fit the regressions one after the other, until one is good enough."""
    trials = []
    rows, shift = rows_of(cloud, log_base, split.train)
    target = (cloud.log_q - log_base)[split.hold] - shift
    for name, fit in regressions:
        residual = fit(rows)
        if len(split.hold):
            values = evaluate(residual, cloud.z[split.hold])
            error = spread(target - values, split.weight)
        else:
            error = np.inf
        trials.append(Trial(error, name, base, log_base, fit, residual, shift))
        if error < ENOUGH:
            break
    return trials


def candidates(
    key: Array, cloud: Cloud, rng: np.random.Generator, start: Mixture | None, last: str
) -> Iterator[tuple[Trial, Iterator[Mixture]]]:
    """Bases with regressions, best held-out error first, and mixtures to begin drawing from.

    One Gaussian first: only where no regression on top of it does, or draws from it weigh badly,
    the particles are clustered. Last of all comes the mixture alone.
    """
    split, d = hold_out(cloud, rng), cloud.z.shape[1]
    one, log_one = standard(d), -0.5 * (cloud.z**2).sum(1) - 0.5 * d * np.log(2 * np.pi)
    order = sorted(single_base(cloud), key=lambda r: (r[0] != "quadratic", r[0] != last))
    trials, good = attempt(cloud, split, one, log_one, order), GOOD * np.sqrt(d)
    nearby = gaussian(surrogate_of(trials[0])) if trials[0].error < good else None
    first = nearby or start or one
    clustered = cache(lambda: fit_base(key, cloud, start))
    trials.sort(key=lambda t: t.error)
    while trials and trials[0].error < good:
        yield trials.pop(0), lazily(first, clustered)
    mix = clustered()
    log_mix = log_mixture(mix, cloud.z)
    bare = spread((cloud.log_q - log_mix)[split.hold], split.weight)
    if mixture.num_components(mix) > 1:
        trials += local_trials(cloud, split, mix, log_mix, bare)
    for trial in sorted((t for t in trials if t.error <= bare), key=lambda t: t.error):
        yield trial, iter([trial.base if trial.name.startswith("sharp") else mix])
    level = cloud.log_mass - cloud.top - cloud.coordinates.log_det
    yield Trial(bare, "mixture", mix, log_mix, no_residual, ridge.zero(d), level), iter([mix])


def lazily(first: Mixture, then: Callable[[], Mixture]) -> Iterator[Mixture]:
    """One mixture, and another that is only made when it is asked for."""
    yield first
    yield then()


def local_trials(
    cloud: Cloud, split: Split, mix: Mixture, log_mix: np.ndarray, bare: float
) -> list[Trial]:
    """Regressions on the mixture or on the sharpened one, whichever by itself is nearer to log q.

    The other one is tried only where these are not good.
    """
    bases, trials = [(bare, "mix", mix, log_mix)], []
    sharp = sharpen(mix, cloud, split.train)
    if sharp is not None:
        log_sharp = log_mixture(sharp, cloud.z)
        trials = attempt(cloud, split, sharp, log_sharp, [("sharp", no_residual)])
        bases.append((trials[0].error, "sharp", sharp, log_sharp))
    for _, name, base, log_base in sorted(bases, key=lambda b: b[0]):
        trials += attempt(cloud, split, base, log_base, mixture_base(name, cloud))
        if min((t.error for t in trials), default=np.inf) < GOOD * np.sqrt(cloud.z.shape[1]):
            break
    return trials


def surrogate_of(trial: Trial) -> Surrogate:
    """The fitted density of a trial."""
    return Surrogate(few_sizes(trial.base), trial.residual, trial.shift)


def finish(trial: Trial, cloud: Cloud, rng: np.random.Generator) -> Surrogate:
    """Fit a trial's regression again, to all particles, and keep it from exploding."""
    if trial.name == "mixture":
        return surrogate_of(trial)
    index = np.arange(cloud.kept)
    if len(index) > MOST and trial.name != "quadratic":
        index = rng.permutation(index)[:MOST]
    rows, shift = rows_of(cloud, trial.log_base, index)
    if trial.error > ENOUGH and not cloud.big:
        residual = trial.fit(rows)
        if all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(residual)):
            trial = trial._replace(residual=residual, shift=shift)
    surrogate = surrogate_of(trial)
    if trial.name == "sharp" or gaussian(surrogate) is not None:
        return surrogate
    depth = -cloud.log_q[index]
    top, upper = rows.y[depth < cloud.core], rows.y[depth < 2 * cloud.core]
    return surrogate._replace(low=float(upper.min()) - 3, high=float(top.max()) + 0.5)


# ---------------------------------------------------------------- draws
class Proposal(NamedTuple):
    """f with its draws: the mixture it widens, z, log f(z), s(z), and the relative ESS."""

    mix: Mixture
    wide: Mixture
    z: np.ndarray
    log_f: np.ndarray
    log_s: np.ndarray
    ess: float


_widen = jax.jit(mixture.widen, static_argnums=(1, 2))


def draw_from(
    key: Array, surrogate: Surrogate, starts: Iterator[Mixture], rule: "Regression", n: int
) -> Proposal:
    """Draws from a mixture a little wider than s; others, fitted to s, where they weigh badly.

    The particles' own mixture comes in between where the draws are too few to show what s is like.
    """
    alone = gaussian(surrogate)
    starts = starts if alone is None else iter([alone])
    tries: list[Proposal] = []
    for again in jax.random.split(key, 5):
        mix = next(starts, None) if not tries or tries[-1].ess < 0.3 else None
        if mix is None:
            last = tries[-1]
            w, mean, chol = summary(last.z, last.log_s - last.log_f)
            mix = jax.tree.map(np.asarray, mixture.clusters(again, last.z, w, start=last.mix))
        elif len(mix.log_pi) == 1:
            mean, chol = mix.mean[0], mix.chol[0]
        else:
            mean, chol = np.zeros(mix.mean.shape[1]), np.eye(mix.mean.shape[1])
        wide = _widen(few_sizes(mix), rule.spread, rule.wide, mean, chol)
        z, log_f, log_s = propose(surrogate, wide, n, seed_of(again))
        tries.append(Proposal(mix, wide, z, log_f, log_s, ess(log_s - log_f) / n))
        if tries[-1].ess > (0.5 if len(tries) > 1 else 0.7):
            break
    return max(tries, key=lambda t: t.ess)


# ---------------------------------------------------------------- the rule
@dataclass(frozen=True)
class Regression:
    """Densities by regression; see `regression`."""

    spread: float = 0.2
    wide: float = 0.1
    most_gain: float = 0.4
    guard: ClassVar[float] = 0.01
    jittable: ClassVar[bool] = False
    exact: ClassVar[str] = "auto"

    def fit(
        self,
        key: Array,
        theta: ArrayLike,
        log_q: ArrayLike,
        log_w: ArrayLike,
        *,
        num_draws: int,
        previous: Regressed | None = None,
        give_up: float = np.inf,
    ) -> Regressed:
        """Fit a density to the values log q at the particles.

        Fits are taken in order of their held-out error. One is refused that puts mass where the
        particles had none: its mass over theirs by more than `most_gain` nats, or draws of no use.

        Args:
            key: a JAX key.
            theta: particles, (n, d); log_q may be -inf at some.
            log_q: log-density at them, up to a constant.
            log_w: log-weights, log_q less the log-density the particles were drawn from.
            num_draws: draws that normalise the result, kept as its `draws`.
            previous: the last fitted density, tried as a start.
            give_up: held-out error beyond which the mixture alone is returned, at once.
        """
        with jax.enable_x64(True):
            first, second = jax.random.split(key)
            rng = np.random.default_rng(seed_of(key))
            cloud = whiten(theta, log_q, log_w)
            start, last = carried(previous, cloud), getattr(previous, "name", "poly4+rbf1.5")
            log_det = cloud.coordinates.log_det
            refused = -1
            for trial, starts in candidates(first, cloud, rng, start, last):
                if trial.error > give_up and trial.name != "mixture":
                    continue
                refused += 1
                surrogate = finish(trial, cloud, rng)
                proposal = draw_from(second, surrogate, starts, self, num_draws)
                mass = log_mean_exp(proposal.log_s - proposal.log_f)
                gain = float(mass + log_det + cloud.top - cloud.log_mass)
                sound = gaussian(surrogate) is not None
                if sound or (gain < self.most_gain and proposal.ess > 0.02):
                    break
            host = partial(jax.tree.map, np.asarray)
            fitted = Regressed(
                host(surrogate), host(proposal.wide), proposal.mix, cloud.coordinates,
                log_normaliser=mass, name=trial.name, error=trial.error,
                num_components=mixture.num_components(proposal.mix), refused=refused,
                ess=proposal.ess, gain=gain,
            )  # fmt: skip
            return fitted.with_draws(proposal.z, proposal.log_f, proposal.log_s)


def regression(*, spread: float = 0.2, wide: float = 0.1, most_gain: float = 0.4) -> Regression:
    """Densities by regression, the default: f a Gaussian mixture, log q regressed on top of it.

    A kernel estimate throws away that log q is *known* at the particles. Here
    s = log base + r, with r fitted to log q - log base by regularised least squares, is the
    density meant, and f, a mixture a little wider, the one drawn from.

    Args:
        spread: f's covariances are 1 + sqrt(spread / d) times those of s.
        wide: share of f in one Gaussian over everything.
        most_gain: nats of mass that a fit may have beyond the particles' own.

    Example:
        >>> import jax
        >>> from pmd.densities.regression import regression
        >>> theta = jax.random.normal(jax.random.key(0), (500, 2))
        >>> log_q = -0.5 * (theta**2).sum(1)
        >>> fitted = regression().fit(jax.random.key(1), theta, log_q, 0 * log_q, num_draws=500)
        >>> fitted.name, fitted.error < 1e-3
        ('quadratic', True)
    """
    return Regression(spread, wide, most_gain)
