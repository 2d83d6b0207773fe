"""The certificate: how far to trust a run, by its last weights, its fits and its checks."""

import math
import textwrap
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

TRUST, MEANS, NOT = "trust", "means only", "do not trust"
VERDICTS = (TRUST, MEANS, NOT)

# Pareto k: below .5 the weights have a variance, below .7 means of weighted particles still settle.
K_TRUST, K_MEANS = 0.5, 0.7
# The standard error of a posterior mean, in posterior sds: an error of .1 sd is three of .033.
ERROR_TRUST, ERROR_MEANS = 0.033, 0.1
# However good a fit looks, it is not credited with more than this share of the particles' error.
LEAST_CREDIT = 0.1
# Weights tell nothing of mass that no particle met. With few particles much can be missed while k,
# fits and audits look their best (bananas and mixtures at 50 to 200 particles: tails and modes
# lost, k below .3): so many effective particles are asked for, and for every cluster seen.
LEAST_ESS, CLUSTER_ESS = 80.0, 40.0
# A fit with a larger error than this, per square root of a dimension, should not have been kept:
# `exact="auto"` checks from .1 on and walks from .5, unless a budget of evaluations forbids it.
KEPT_TRUST = 0.5
# A last fit with a larger error, per square root of a dimension, leaves tails that no draw reached:
# funnels and mixtures with unknown scales lost up to 15 % of an sd so, with k below .45.
LAST_TRUST = 0.15
SHARE_TRUST = 0.05  # weights that rest on a smaller share of the particles are no good judges
# Errors left in log q, in nats and per square root of a dimension: where such an error is linear,
# its sd in nats is the shift of the mean in whitened posterior sds.
NOISE_TRUST, NOISE_MEANS = 0.03, 0.1


def pareto_k(log_weights: ArrayLike) -> tuple[float, np.ndarray]:
    """Shape k of the tail of importance weights, and the weights with that tail smoothed.

    Pareto-smoothed importance sampling (Vehtari et al.): the largest min(m / 5, 3 sqrt(m))
    weights are taken as draws of a generalised Pareto distribution, fitted by the estimator of
    Zhang and Stephens (2009), and replaced by its quantiles.

    Args:
        log_weights: log importance weights, up to one constant; -inf for a weight of zero.

    Returns:
        k, -inf for weights that are equal or bounded by many equal ones and inf where there are
        too few to say; and the smoothed log-weights, whose exponentials sum to one.

    Example:
        >>> import numpy as np
        >>> k, smoothed = pareto_k(np.random.default_rng(0).normal(size=1000))
        >>> bool(k < 0.7), round(float(np.exp(smoothed).sum()), 6)
        (True, 1.0)
    """
    x = np.array(log_weights, dtype=float)
    top = x.max(initial=-np.inf)
    if not np.isfinite(top) or np.isnan(x).any():
        return math.inf, x
    x -= top
    size = math.ceil(min(len(x) / 5, 3 * math.sqrt(len(x))))
    order = np.argsort(x, kind="stable")
    cut = max(x[order[-size - 1]], math.log(np.finfo(float).tiny)) if size < len(x) else -np.inf
    excess = np.exp(x[order]) - math.exp(cut)
    tail, excess = order[excess > 0], excess[excess > 0]
    if -cut < 1e-8 or (len(tail) < 5 <= size and cut == x[order[-5]]):
        k = -math.inf
    elif len(tail) < 5:
        k = math.inf
    else:
        k, scale = fit_pareto(excess)
        at = (np.arange(len(tail)) + 0.5) / len(tail)
        x[tail] = np.minimum(np.log(math.exp(cut) + pareto_quantile(at, k, scale)), 0.0)
    return k, x - np.log(np.exp(x).sum())


def fit_pareto(x: np.ndarray) -> tuple[float, float]:
    """Shape and scale of a generalised Pareto distribution from sorted excesses.

    Zhang and Stephens (2009): b = k / scale is averaged over a grid under its profile likelihood;
    the shape is then drawn towards .5 as if by ten more observations.
    """
    n = len(x)
    grid = 30 + int(math.sqrt(n))
    b = 1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    b = b / (3 * x[int(n / 4 + 0.5) - 1]) + 1 / x[-1]
    shape = np.log1p(-b[:, None] * x).mean(1)
    b, shape = b[shape != 0], shape[shape != 0]
    profile = n * (np.log(-b / shape) - shape - 1)
    weight = np.exp(profile - profile.max())
    b = float(b @ weight / weight.sum())
    k = float(np.log1p(-b * x).mean())
    return (n * k + 5) / (n + 10), -k / b


def pareto_quantile(at: np.ndarray, k: float, scale: float) -> np.ndarray:
    """Quantiles of the generalised Pareto distribution: scale ((1 - p)^-k - 1) / k."""
    if abs(k) < np.finfo(float).eps:
        return -scale * np.log1p(-at)
    return scale * np.expm1(-k * np.log1p(-at)) / k


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What is known about the quality of a result; `print` it for one paragraph.

    `verdict` is "trust", "means only" or "do not trust", and `reasons` says why. The rules:

    - Pareto k below .5 (fewer than 100 particles: below 1 - 1 / log10 m) for "trust", below .7 for
      "means only".
    - The standard error of a posterior mean, `mean_error`, at most .033 posterior sds for "trust"
      (an error of .1 sd is then three standard errors), at most .1 for "means only".
    - For "trust" an effective sample size of at least 80, 40 for every cluster that a fit of the
      run saw, and 5 % of the particles; for "means only" half of the first two.
    - "trust" needs a last fit of log q with an error of at most .15 sqrt(d) nats.
    - "trust" needs a last step on all rows, taken whole. Without one, what is left in log q
      (minibatch noise and the error of the last fit) may be .03 sqrt(d) nats for "trust" and
      .1 sqrt(d) for "means only"; no fit may have gone unmeasured and no step been guarded.
    - Every poor fit was checked against the exact iterate, no fit with an error above .5 sqrt(d)
      nats was kept (a budget of evaluations may not pay for the checks), or an independent second
      run agrees.
      More than one component and `exact="never"`: "do not trust" until one does.
    - `exact="never"` and fits whose errors nobody measured: not more than "means only".
    - A second run that disagrees: "do not trust".
    - After an update the verdict is no better than that on the earlier rows, and the error of the
      density that stands for them counts as minibatch noise does.

    Attributes:
        pareto_k: tail of the last weights.
        ess: their effective number of particles.
        num_particles: particles of the result.
        dimension: number of unconstrained parameters.
        log_evidence: log of the integral of prior times likelihood.
        log_evidence_error: its standard error, in nats.
        minibatch_noise: posterior sd, in nats, of what log q lacks or has too much of: the rows'
            weights less one times their log-likelihoods. 0 after an exact step.
        fit_error: held-out error of the last fit of log q, in nats; nan where none was measured.
        worst_kept_error: largest held-out error of a fit whose values were kept.
        worst_audit: largest error of an audited draw of a fit whose values were kept.
        kept, reweighed, walked: moves by what was done with them.
        refused: fits refused on the way.
        guarded: steps made smaller by the guard.
        evaluations: likelihood evaluations, particles times rows over N.
        exact: the run's `exact=`, "auto", "never" or "always".
        exact_last: whether the last step was on all rows, with g = 1 and no guard.
        unchecked_poor_fits: fits with a large error whose values were kept without a look at the
            exact iterate.
        num_modes: most clusters that a fit of the run saw.
        unseen_mass: share of the mass that one of two independent runs did not see,
            1 - exp(-|log Z1 - log Z2|); nan before there is a second run.
        second_run: None, "agrees" or "disagrees".
        earlier_verdict: after an update, the verdict on the posterior that was updated, else None.
        earlier_error: held-out error in nats of the density that stands for its rows.
        warnings: what was said before the run, as sentences.
    """

    pareto_k: float
    ess: float
    num_particles: int
    dimension: int
    log_evidence: float
    log_evidence_error: float
    minibatch_noise: float
    fit_error: float
    exact: str
    exact_last: bool
    evaluations: float
    worst_kept_error: float = math.nan
    worst_audit: float = math.nan
    kept: int = 0
    reweighed: int = 0
    walked: int = 0
    refused: int = 0
    guarded: int = 0
    unchecked_poor_fits: int = 0
    num_modes: int = 1
    unseen_mass: float = math.nan
    second_run: str | None = None
    earlier_verdict: str | None = None
    earlier_error: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def mean_error(self) -> float:
        """Standard error of a posterior mean, in posterior sds.

        Particles alone have 1 / sqrt(ESS). Where a density fitted to log q carries the result, its
        error e (in nats) takes the place of 1: the correction averages e times the function. A
        fit is credited only where particles outnumber the coefficients of a quadratic.
        """
        coefficients = (self.dimension + 1) * (self.dimension + 2) / 2
        credit = 1.0
        if math.isfinite(self.fit_error) and self.num_particles >= 1.3 * coefficients:
            # Between modes a fit's error counts more: it is the mass that may be wrong.
            error = self.fit_error if self.num_modes == 1 else 2 * self.fit_error
            credit = min(1.0, max(error, LEAST_CREDIT))
        return credit / math.sqrt(self.ess) if self.ess > 0 else math.inf

    @property
    def verdict(self) -> str:
        """How far to trust the result: "trust", "means only" or "do not trust"."""
        return VERDICTS[max(level for level, _ in self._findings())]

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is what it is, in plain sentences, the gravest first."""
        findings = self._findings()
        worst = max(level for level, _ in findings)
        order = sorted(findings, key=lambda finding: -finding[0])
        return [sentence for level, sentence in order if level > 0 or worst == 0]

    def _findings(self) -> list[tuple[int, str]]:
        """Every rule's level (index of a verdict) and sentence."""
        findings = [self._tail(), self._number(), self._explored(), self._last_step()]
        findings.append(self._other_runs())
        if self.earlier_verdict is not None:
            findings.append(self._earlier(self.earlier_verdict))
        figures = (self.log_evidence, self.ess)
        if not all(math.isfinite(figure) for figure in figures):
            findings.append((2, "The weights or the log-evidence are not finite."))
        return findings

    def _tail(self) -> tuple[int, str]:
        limit = K_TRUST
        if self.num_particles < 100:
            limit = 1 - 1 / math.log10(max(self.num_particles, 11))
        figure = f"Pareto k of the last weights is {self.pareto_k:.2f}"
        if self.pareto_k < limit:
            return 0, f"{figure}, below {limit:.2g}."
        if self.pareto_k < K_MEANS:
            return 1, f"{figure}, not below {limit:.2g}: variances and tails may be off."
        return 2, f"{figure}, not below {K_MEANS}: a few particles carry the result."

    def _number(self) -> tuple[int, str]:
        error = self.mean_error
        figure = f"posterior means are known to about {error:.2g} posterior sd"
        if not error <= ERROR_MEANS:
            return 2, f"At an effective sample size of {self.ess:.0f}, {figure}."
        if error > ERROR_TRUST:
            return 1, f"At an effective sample size of {self.ess:.0f}, {figure}."
        return 0, figure[0].upper() + figure[1:] + "."

    def _explored(self) -> tuple[int, str]:
        need = max(LEAST_ESS, CLUSTER_ESS * self.num_modes)
        figure = f"The effective sample size is {self.ess:.0f} of {self.num_particles} particles"
        if not self.ess >= need:
            return 1 + int(not self.ess >= need / 2), (
                f"{figure}; to rule out that tails or modes were missed it takes {need:.0f} "
                f"({count(self.num_modes, 'cluster')} seen)."
            )
        if self.ess < SHARE_TRUST * self.num_particles:
            return 1, f"{figure}: too small a share to judge the weights by."
        return 0, f"{figure}."

    def _last_step(self) -> tuple[int, str]:
        if self.exact_last and self.fit_error > LAST_TRUST * math.sqrt(self.dimension):
            return 1, (
                f"The weights are exact, but the last fit of log q is off by {self.fit_error:.2g} "
                "nats: tails that its draws did not reach may be missing."
            )
        if self.exact_last:
            return 0, "The last step was taken whole, on all rows: the weights are exact."
        root = math.sqrt(self.dimension)
        fitted = self.kept > 0
        left = math.hypot(self.minibatch_noise, self.fit_error if fitted else 0.0)
        if fitted and math.isnan(self.fit_error):
            left = self.minibatch_noise
        figure = (
            f"The last step was not an exact one on all rows; about {left:.2g} nats of error are "
            f"left in log q, {left / root:.2g} a root of the dimension"
        )
        if math.isnan(left):
            figure = (
                "The last step was not an exact one on all rows, and how much error it leaves in "
                "log q is not known"
            )
        if not left <= NOISE_MEANS * root:
            return 2, figure + "."
        if fitted and math.isnan(self.fit_error):
            return 1, figure + ", and the error of the fits was not measured."
        if self.guarded:
            return 1, figure + ", and the guard cut steps short."
        return int(left > NOISE_TRUST * root), figure + "."

    def _other_runs(self) -> tuple[int, str]:
        if self.second_run == "agrees":
            return 0, "An independent second run agrees."
        if self.second_run == "disagrees":
            return 2, (
                "An independent second run disagrees: one of the two missed mass. "
                "The result pools both."
            )
        if self.exact == "never" and self.num_modes > 1:
            return 2, (
                f"{self.num_modes} components were seen and no fit was checked (exact='never'): "
                "mass may be lost until an independent second run agrees (certify)."
            )
        if self.exact == "never" and self.kept and math.isnan(self.worst_kept_error):
            return 1, (
                "No fit was checked (exact='never') and their errors were not measured: mass may "
                "be lost until an independent second run agrees (certify)."
            )
        if self.unchecked_poor_fits:
            return 1, (
                f"{count(self.unchecked_poor_fits, 'poor fit')} went unchecked: mass may be lost "
                "until an independent second run agrees (certify)."
            )
        if self.worst_kept_error > KEPT_TRUST * math.sqrt(self.dimension):
            return 1, (
                f"A fit with an error of {self.worst_kept_error:.2g} nats was kept on the way: "
                "mass may be lost until an independent second run agrees (certify)."
            )
        return 0, "No poor fit went unchecked."

    def _earlier(self, verdict: str) -> tuple[int, str]:
        share = self.earlier_error / math.sqrt(self.dimension)
        level = 0 if share <= NOISE_TRUST else 1 if share <= NOISE_MEANS else 2
        return max(level, VERDICTS.index(verdict)), (
            f"Earlier rows entered as the density fitted to them (verdict {verdict!r}, error "
            f"{self.earlier_error:.2g} nats, {share:.2g} a root of the dimension)."
        )

    def __str__(self) -> str:
        """One paragraph: the verdict, why, and the figures."""
        sentences = [f"Verdict: {self.verdict}.", *self.reasons, self._figures(), *self.warnings]
        text = " ".join(sentence.strip() for sentence in sentences)
        return textwrap.fill(text, 79, break_on_hyphens=False)

    def _figures(self) -> str:
        parts = [
            count(self.dimension, "dimension"),
            f"log-evidence {self.log_evidence:.3f} ± {self.log_evidence_error:.2g}",
            f"minibatch noise {self.minibatch_noise:.2g} nats",
            f"error of the last fit {self.fit_error:.2g} nats",
            f"moves: {self.kept} kept, {self.reweighed} re-weighed, {self.walked} walked, "
            f"{self.refused} refused (exact={self.exact!r})",
        ]
        if math.isfinite(self.worst_kept_error):
            parts.append(f"worst error of a kept fit {self.worst_kept_error:.2g} nats")
        if math.isfinite(self.worst_audit):
            parts.append(f"worst audit {self.worst_audit:.2g} nats")
        parts.append(count(self.guarded, "guarded step"))
        parts.append(f"most clusters seen {self.num_modes}")
        if math.isfinite(self.unseen_mass):
            parts.append(f"unseen mass about {self.unseen_mass:.2g}")
        parts.append(f"{self.evaluations:,.0f} likelihood evaluations")
        return "Figures: " + "; ".join(parts) + "."


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 step, 2 steps."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
