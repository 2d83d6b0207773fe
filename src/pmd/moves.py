"""Moving the particles: fit a density, draw from it, weigh the draws, and check them.

How far to trust a fit: the exact iterate can be evaluated for the price p = rows seen / N, so a
fit is kept where its held-out error and an audit of a few draws are small, its draws are weighed
exactly where they are larger, and where the fit is poor the particles walk under the exact
iterate instead.  The error borne grows with the price.
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmd import exact as exact_iterate
from pmd.clock import Clock
from pmd.likelihood import Blocks
from pmd.mirror import State, log_weights, relocate
from pmd.problem import Flat
from pmd.weights import ess

PyTree = Any
Cloud = tuple[np.ndarray, np.ndarray, np.ndarray]  # particles, log q, log-weights

AUDITED = 64  # draws whose log q is evaluated exactly after a fit
REWEIGH, WALK, GROW = 0.1, 0.35, 0.2  # nats per sqrt(d) of held-out error
SWEEPS = 20  # that a walk is taken to need
USELESS, ATTEMPTS = 0.05, 3  # effective share of re-weighed draws below which a fit is tried again
LARGE = 500  # coefficients of a quadratic above which only the last steps are checked


class MoveInfo(NamedTuple):
    """What a move did."""

    action: str  # "fit", "reweigh" or "walk"
    density: Any  # what was fitted
    error: float  # held-out error of log q, nats
    audit: float  # largest error of log q at audited draws, nan where none was made
    ess: float  # relative effective sample size after the move
    count: int  # particles after the move
    evaluations: float  # likelihood evaluations spent on checks, in passes of one particle
    seconds: float
    culprit: np.ndarray | None = None  # where the likelihood was NaN or +inf


@dataclass(frozen=True)
class Redraw:
    """Fit and draw as one traceable function, for densities that allow it (strategy 2)."""

    flat: Flat
    density: Any

    def __call__(self, key: Array, state: State, count: Array) -> State:
        """New particles from the fitted density; the density drawn from is the one meant."""
        fit_key, draw_key, mix_key = jax.random.split(key, 3)
        capacity = len(state.theta)
        fitted = self.fitted(fit_key, state)
        draws = fitted.draw(draw_key, capacity)
        mixed = jax.random.permutation(mix_key, capacity)  # only the first `count` are kept
        theta = draws.theta[mixed].astype(state.theta.dtype)
        log_f, log_q = draws.log_f[mixed], draws.log_q[mixed]
        return relocate(state, theta, log_q, log_f, self.flat.log_prior(theta), count)

    def fitted(self, key: Array, state: State) -> Any:
        """The density fitted to the particles of a state."""
        log_w = log_weights(state)
        return self.density.fit(key, state.theta, state.log_q, log_w, num_draws=len(log_w))


@partial(jax.jit, static_argnames="redraw")
def redrawn(redraw: Redraw, key: Array, state: State, count: Array) -> tuple[State, Any]:
    """One traceable move, compiled, and the density it drew from."""
    return redraw(key, state, count), redraw.fitted(jax.random.split(key, 3)[0], state)


def live(state: State) -> Cloud:
    """Particles in use, log q and log-weights, as float64 on the host."""
    count = int(state.count)
    theta = np.asarray(state.theta, np.float64)[:count]
    log_q = np.asarray(state.log_q, np.float64)[:count]
    return theta, log_q, log_q - np.asarray(state.log_p0, np.float64)[:count]


def padded(array: np.ndarray, capacity: int, fill: float | np.ndarray) -> np.ndarray:
    """An array with rows added up to `capacity`."""
    extra = np.broadcast_to(
        np.asarray(fill, array.dtype), (capacity - len(array), *array.shape[1:])
    )
    return np.concatenate([array, extra])


def place(
    flat: Flat,
    state: State,
    theta: np.ndarray,
    log_q: np.ndarray,
    log_p0: np.ndarray,
    log_prior: np.ndarray | None = None,
    exact: bool = False,
) -> State:
    """A state with the given particles, padded to the capacity of the one before."""
    capacity, kind = len(state.theta), state.theta.dtype
    count = jnp.asarray(len(theta), jnp.int32)
    points = jnp.asarray(padded(np.asarray(theta, kind), capacity, theta[0]))
    prior = (
        flat.log_prior(points)
        if log_prior is None
        else jnp.asarray(padded(np.asarray(log_prior, kind), capacity, 0.0))
    )
    q = jnp.asarray(padded(np.asarray(log_q, kind), capacity, -np.inf))
    p0 = jnp.asarray(padded(np.asarray(log_p0, kind), capacity, 0.0))
    return relocate(state, points, q, p0, prior, count, exact)


@dataclass
class Mover:
    """Everything a move needs that stays the same during a run."""

    flat: Flat
    blocks: Blocks
    density: Any
    exact: str  # "auto", "never", "always"
    num_particles: int
    clock: Clock = field(default_factory=Clock)
    most: int = 4  # times num_particles: what the number may grow to while fits are poor

    @property
    def dimension(self) -> int:
        """The number of coordinates."""
        return self.flat.dimension

    @property
    def large(self) -> bool:
        """Whether checks are left to the last exact steps: too many coordinates to walk in."""
        return (self.dimension + 1) * (self.dimension + 2) // 2 > LARGE

    def tolerance(self) -> float:
        """The held-out error above which fits count as poor and particles are added."""
        return GROW * float(np.sqrt(self.dimension))

    def next_count(self, now: int, error: float) -> int:
        """Twice as many particles while fits are poor, half while they are very good."""
        if self.most == 1:
            return now
        tolerance = self.tolerance()
        if not error <= tolerance:
            return min(2 * now, self.most * self.num_particles)
        return max(self.num_particles, now // 2) if error < tolerance / 3 else now

    def move(
        self,
        key: Array,
        state: State,
        rows: PyTree,
        count: int,
        previous: MoveInfo | None = None,
        exact_next: bool = False,
        allowance: float = np.inf,
    ) -> tuple[State, MoveInfo]:
        """Fit, draw `count` particles, weigh, check.

        Args:
            exact_next: the next step makes the weights exact anyway, so nothing is checked.
            allowance: likelihood evaluations that the checks may cost.
        """
        began = time.perf_counter()
        allowed = 0.0 if exact_next else allowance
        with self.clock("move"):
            if self.density.jittable:
                redraw = Redraw(self.flat, self.density)
                state, fitted = redrawn(redraw, key, state, jnp.asarray(count, jnp.int32))
                it = exact_iterate.iterate(state)
                return self.weighed(key, state, it, rows, fitted, allowed, began)
            return self.fitted_move(key, state, rows, count, previous, allowance, exact_next, began)

    def fitted_move(
        self, key: Array, state: State, rows: PyTree, count: int, previous: MoveInfo | None,
        allowance: float, exact_next: bool, began: float,
    ) -> tuple[State, MoveInfo]:  # fmt: skip
        """A move of a density that is fitted on the host; fitted again where its draws are useless.

        Draws that turn out to weigh next to nothing are values all the same: they show the next
        fit where the last one went wrong.
        """
        it = exact_iterate.iterate(state)
        price = self.price(state, it)
        limit = WALK * float(np.sqrt(self.dimension)) * (1 + price / 2)
        dear = price * 2 * self.num_particles * SWEEPS > allowance
        allowed = 0.0 if exact_next else allowance
        may_walk = self.checked(price) and not self.large and not dear
        values, last, spent = live(state), previous.density if previous else None, 0.0
        for again in range(ATTEMPTS):
            fit_key, draw_key, check_key = jax.random.split(jax.random.fold_in(key, again), 3)
            last = self.density.fit(
                fit_key, *values, num_draws=count, previous=last,
                give_up=limit if may_walk else np.inf,
            )  # fmt: skip
            error = float(np.asarray(last.error))
            if may_walk and not error < limit:
                state, walk = self.walk(check_key, state, it, rows, 2 * self.num_particles)
                seconds, spent = time.perf_counter() - began, spent + walk.evaluations
                walk = walk._replace(density=last, error=error, evaluations=spent)
                return state, walk._replace(seconds=seconds)
            draws = last.draw(draw_key, count)
            moved = place(self.flat, state, draws.theta, draws.log_q, draws.log_f)
            moved, info = self.weighed(check_key, moved, it, rows, last, allowed - spent, began)
            spent += info.evaluations
            useless = info.action == "reweigh" and info.ess < USELESS and info.culprit is None
            if not useless or 2 * price * (count + AUDITED) > allowed - spent:
                break
            values = self.joined(it, rows, values, live(moved), len(state.theta))
            spent += 2 * price
        return moved, info._replace(evaluations=spent)

    def joined(self, it: Any, rows: PyTree, old: Cloud, new: Cloud, capacity: int) -> Cloud:
        """Two weighted clouds as one: log q on one scale, each with the weight of its ESS."""
        top = [cloud[0][np.argmax(cloud[1])] for cloud in (old, new)]
        exact = self.evaluate(it, rows, np.stack(top), capacity)
        shift = (exact[1] - new[1].max()) - (exact[0] - old[1].max())
        weights = []
        for _, _, log_w in (old, new):
            w = np.exp(log_w - log_w.max())
            weights.append(w / w.sum() * (w.sum() ** 2 / (w @ w)))
        w = np.concatenate(weights)
        with np.errstate(divide="ignore"):
            log_w = np.log(w / w.sum() * len(w))
        return np.concatenate([old[0], new[0]]), np.concatenate([old[1], new[1] + shift]), log_w

    def price(self, state: State, it: Any) -> float:
        """What one evaluation of the exact iterate costs: rows seen over rows there are."""
        return float(it.seen) / max(len(state.row_weights), 1)

    def checked(self, price: float) -> bool:
        """Whether moves are held against the exact iterate."""
        asked = self.exact == "always" or (self.exact == "auto" and not self.large)
        return asked and price > 0

    def weighed(
        self, key: Array, state: State, it: Any, rows: PyTree, fitted: Any, allowance: float,
        began: float,
    ) -> tuple[State, MoveInfo]:  # fmt: skip
        """The draws of a fit, audited or weighed exactly as far as evaluations allow."""
        price, count = self.price(state, it), int(state.count)
        action, audit, spent, culprit = "fit", np.nan, 0.0, None
        if self.checked(price) and price * (count + AUDITED) <= allowance:
            limit = REWEIGH * float(np.sqrt(self.dimension)) * (1 + 2 * price)
            error = float(np.asarray(fitted.error))
            state, action, audit, spent, culprit = self.check(key, state, it, rows, limit, error)
        return state, self.info(action, fitted, audit, state, spent, began, culprit)

    def info(
        self, action: str, fitted: Any, audit: float, state: State, spent: float, began: float,
        culprit: np.ndarray | None = None,
    ) -> MoveInfo:  # fmt: skip
        """The record of a move."""
        count = int(state.count)
        share = float(ess(log_weights(state))) / count
        error = float(np.asarray(fitted.error))
        seconds = time.perf_counter() - began
        return MoveInfo(action, fitted, error, audit, share, count, spent, seconds, culprit)

    def check(
        self, key: Array, state: State, it: Any, rows: PyTree, limit: float, error: float
    ) -> tuple[State, str, float, float, np.ndarray | None]:
        """Audit the draws, and weigh all of them exactly where the fit does not hold.

        Returns the state, what was done, the audit, evaluations spent, and a draw at which the
        likelihood was NaN or +inf, if there was one: nothing is weighed then.
        """
        theta, log_q, log_w = live(state)
        price = self.price(state, it)
        audit, spent = np.nan, 0.0
        wrong = self.exact == "always" or error >= limit  # nan, not measured: the audit tells
        if not wrong:
            chosen = audited(key, log_w)
            exact = self.evaluate(it, rows, theta[chosen], len(state.theta))
            audit = audit_error(log_q, log_q[chosen], exact, self.dimension)
            spent += len(chosen) * price
            wrong = not audit <= 3 * limit
        if not wrong:
            return state, "fit", audit, spent, None
        exact = self.evaluate(it, rows, theta, len(state.theta))
        spent += len(theta) * price
        bad = ~(exact < np.inf)
        if bad.any():
            return state, "reweigh", audit, spent, theta[np.argmax(bad)]
        log_p0 = np.asarray(state.log_p0, np.float64)[: len(theta)]
        prior = np.asarray(state.log_prior)[: len(theta)]
        if np.isfinite(exact).any():
            shift = np.max(exact) - np.max(log_q)
            state = place(self.flat, state, theta, exact - shift, log_p0, prior, exact=True)
        return state, "reweigh", audit, spent, None

    def evaluate(self, it: Any, rows: PyTree, theta: np.ndarray, capacity: int) -> np.ndarray:
        """The exact log q at some vectors (relative to the reference), through one program."""
        points = jnp.asarray(padded(np.asarray(theta, it.reference.dtype), capacity, theta[0]))
        count = jnp.asarray(len(theta), jnp.int32)
        with self.clock("likelihood"):
            value, _, _ = exact_iterate.log_density(self.flat, self.blocks, it, rows, points, count)
            return np.asarray(value, np.float64)[: len(theta)]

    def walk(
        self, key: Array, state: State, it: Any, rows: PyTree, count: int
    ) -> tuple[State, MoveInfo]:
        """Resample to `count` particles and let them walk under the exact iterate."""
        began = time.perf_counter()
        count = min(count, len(state.theta))
        with self.clock("walk"):
            end, log_prior = exact_iterate.walk(self.flat, self.blocks, key, state, it, rows, count)
            jax.block_until_ready(end)
        theta, log_q = np.asarray(end.theta), np.asarray(end.log_q - end.offset, np.float64)
        # A particle that began where log q is -inf and found no way out has no weight.
        log_p0 = np.where(np.isfinite(log_q), log_q, 0.0)
        prior = np.asarray(log_prior)
        state = place(self.flat, state, theta, log_q, log_p0, prior, exact=True)
        price = self.price(state, it)
        seconds = time.perf_counter() - began
        spent = count * price * (1 + int(end.sweeps))
        culprit = np.asarray(end.culprit) if int(end.bad) else None
        return state, MoveInfo("walk", None, np.nan, np.nan, 1.0, count, spent, seconds, culprit)


def audited(key: Array, log_w: np.ndarray) -> np.ndarray:
    """Numbers of the draws to audit: half by weight, half evenly."""
    seed = np.asarray(jax.random.key_data(key)).ravel()
    random = np.random.default_rng([int(s) for s in seed])
    w = np.exp(log_w - log_w.max())
    half = min(AUDITED // 2, len(log_w))
    by_weight = random.choice(len(log_w), half, p=w / w.sum())
    return np.unique(np.r_[by_weight, random.choice(len(log_w), half)])


def audit_error(log_q: np.ndarray, fitted: np.ndarray, exact: np.ndarray, dimension: int) -> float:
    """The largest error of log q at audited draws that matter, up to a common constant."""
    error = exact - fitted
    upper = fitted >= np.median(fitted)
    reference = np.median(error[upper])
    if not np.isfinite(reference):
        return np.inf
    alive = fitted + error - reference > log_q.max() - 6 - dimension / 2
    return float(np.abs(error - reference)[alive].max()) if alive.any() else np.inf
