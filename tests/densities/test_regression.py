"""Densities by regression: accuracy against closed forms and grids, invariances, odd clouds."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pmd.densities import regression, unpack
from pmd.densities.mixture import log_prob as mixture_log_prob
from pmd.densities.surrogate import Regressed
from pmd.errors import NotFiniteError

RULE = regression()


class Cloud(NamedTuple):
    """Particles, log q at them, log-weights."""

    theta: np.ndarray
    log_q: np.ndarray
    log_w: np.ndarray


def cloud(log_q: Callable, n: int, d: int, scale: float = 1.4, seed: int = 0) -> Cloud:
    """Draws of N(0, scale^2 I), and log q there."""
    z = np.random.default_rng(seed).standard_normal((n, d))
    value = log_q(scale * z)
    log_p0 = -0.5 * (z**2).sum(1) - d * np.log(scale * np.sqrt(2 * np.pi))
    return Cloud(scale * z, value, value - log_p0)


def skewed(x: np.ndarray) -> np.ndarray:
    """An asymmetric density in any dimension; the first coordinate has two unequal modes."""
    a, b = -0.5 * ((x[:, 0] - 1.2) / 0.8) ** 2, -0.5 * ((x[:, 0] + 1.3) / 0.7) ** 2 - 0.7
    return np.logaddexp(a, b) - 0.5 * ((x[:, 1:] - 0.3 * x[:, :1] ** 2) ** 2).sum(1)


def fit(points: Cloud, seed: int = 1, **options: object) -> Regressed:
    """The default rule's fit."""
    return RULE.fit(jax.random.key(seed), *points, **{"num_draws": 1000, **options})


def grid(edge: float = 6.0, n: int = 161) -> tuple[np.ndarray, float]:
    """Points of a square and the area of a cell."""
    axis = np.linspace(-edge, edge, n)
    return np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2), (
        axis[1] - axis[0]
    ) ** 2


@pytest.fixture(scope="module")
def fitted() -> Regressed:
    """A fit of the asymmetric density in two dimensions."""
    return fit(cloud(skewed, 1200, 2))


def test_a_gaussian_is_found_exactly() -> None:
    """A quadratic log q: mean, covariance and normaliser, whatever constant log q carries."""
    cov = np.array([[1.0, 0.3], [0.3, 0.5]])
    mean = np.array([0.5, -1.0])
    constant = -0.5 * np.log(np.linalg.det(2 * np.pi * cov))

    def log_q(x: np.ndarray) -> np.ndarray:
        return -0.5 * np.einsum("ni,ij,nj->n", x - mean, np.linalg.inv(cov), x - mean)

    found = fit(cloud(lambda x: log_q(x) + 1000, 600, 2))
    assert found.name == "quadratic"
    assert found.error < 1e-5
    x = np.random.default_rng(5).standard_normal((100, 2))
    # Sobol draws integrate this smooth a function far better than 1 / sqrt(1000).
    np.testing.assert_allclose(found.log_prob(x), log_q(x) + constant, atol=3e-3)
    assert found.ess > 0.85


def test_an_asymmetric_density_on_a_grid(fitted: Regressed) -> None:
    """Total variation, mass of the smaller mode, and the normaliser."""
    x, cell = grid()
    truth = skewed(x)
    truth = truth - np.log(np.exp(truth).sum() * cell)
    better = fitted.normalise(jax.random.key(2), 2**14)
    found = better.log_prob(x)
    assert abs(np.log(np.exp(found).sum() * cell)) < 1e-3
    assert 0.5 * np.abs(np.exp(found) - np.exp(truth)).sum() * cell < 5e-3
    low = x[:, 0] < 0
    assert abs((np.exp(found) - np.exp(truth))[low].sum() * cell) < 2e-3
    assert fitted.error < 0.02
    assert fitted.log_normaliser == pytest.approx(better.log_normaliser, abs=0.01)


def test_the_error_it_states_is_the_error_it_has(fitted: Regressed) -> None:
    """Nine in ten particles never seen are fitted as those held out, within a factor of three."""
    new = cloud(skewed, 1000, 2, seed=9)
    residual = new.log_q - fitted.log_prob(new.theta)
    # The few that lie outside of all particles seen are extrapolation.
    off = np.sort(np.abs(residual - np.median(residual)))[:900]
    assert np.sqrt(np.mean(off**2)) < 3 * fitted.error + 1e-3


def test_modes_apart_in_three_dimensions() -> None:
    """Six narrow modes of unequal mass: each is clustered and keeps its mass."""
    rng = np.random.default_rng(0)
    centre = np.r_[np.eye(3), -np.eye(3)] * 5
    mass = np.arange(1, 7) / 21
    z = centre[rng.integers(6, size=1800)] + rng.standard_normal((1800, 3))

    def parts(x: np.ndarray, sd: float) -> np.ndarray:
        apart = ((x[:, None] - centre) ** 2).sum(2) / sd**2
        return -0.5 * apart - 3 * np.log(sd * np.sqrt(2 * np.pi))

    log_q = np.logaddexp.reduce(parts(z, 0.8) + np.log(mass), axis=1)
    log_p0 = np.logaddexp.reduce(parts(z, 1.0) - np.log(6), axis=1)
    found = fit(Cloud(z, log_q, log_q - log_p0))
    assert found.num_components >= 6
    assert found.error < 0.2
    assert found.ess > 0.7
    draws = found.draws
    assert draws is not None
    w = np.exp(draws.log_q - draws.log_f) / len(draws.theta)
    which = ((draws.theta[:, None] - centre) ** 2).sum(2).argmin(1)
    # 1000 draws of relative ESS .8, spread over the modes: 3 sd of the largest mass is .05.
    np.testing.assert_allclose(np.bincount(which, w, minlength=6), mass, atol=0.05)


def test_affine_maps_change_only_rounding() -> None:
    """Turned, stretched a million times, shifted: densities are the same functions."""
    points = cloud(skewed, 900, 2)
    angle = 0.7
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    a, b = turn @ np.diag([1e3, 1e-3]) @ turn.T, np.array([20.0, -3.0])
    log_det = np.linalg.slogdet(a)[1]
    moved = Cloud(points.theta @ a.T + b, points.log_q - log_det, points.log_w)
    one, other = fit(points), fit(moved)
    x = np.random.default_rng(5).standard_normal((200, 2))
    assert one.name == other.name
    assert one.num_components == other.num_components
    assert one.error == pytest.approx(other.error, rel=1e-3, abs=1e-6)
    y = x @ a.T + b
    np.testing.assert_allclose(other.log_prob(y) + log_det, one.log_prob(x), atol=1e-4)
    np.testing.assert_allclose(other.log_proposal(y) + log_det, one.log_proposal(x), atol=1e-4)
    assert one.draws is not None
    assert other.draws is not None
    back = np.linalg.solve(a, (other.draws.theta - b).T).T
    np.testing.assert_allclose(back, one.draws.theta, atol=1e-4)


def test_order_and_constants_do_not_matter() -> None:
    """Particles permuted, log q shifted: the same density to rounding."""
    points = cloud(skewed, 900, 2)
    order = np.random.default_rng(1).permutation(900)
    other = Cloud(points.theta[order], points.log_q[order] + 700, points.log_w[order] + 700)
    x = np.random.default_rng(5).standard_normal((200, 2))
    np.testing.assert_allclose(fit(other).log_prob(x), fit(points).log_prob(x), atol=1e-6)


def test_float64_stays_inside(fitted: Regressed) -> None:
    """float32 in, float64 NumPy out, and a float32 process stays one."""
    points = cloud(skewed, 1200, 2)
    found = fit(Cloud(*(jnp.asarray(a, jnp.float32) for a in points)))
    assert found.error < 0.02
    draws = found.draw(jax.random.key(3), 100)
    leaves = [*draws, found.log_prob(jnp.zeros((3, 2))), *jax.tree.leaves(found.surrogate)]
    assert all(isinstance(a, np.ndarray | float) for a in leaves)
    assert {np.asarray(a).dtype for a in draws} == {np.dtype(np.float64)}
    assert jnp.zeros(1).dtype == jnp.float32


def test_traced_log_prob_in_a_float32_program(fitted: Regressed) -> None:
    """Inside jit and vmap, in the caller's dtype and with float64's accuracy."""
    x = np.random.default_rng(5).standard_normal((50, 2)).astype(np.float32)
    batch = jax.jit(fitted.log_prob_traced)(x)
    one = jax.jit(jax.vmap(fitted.log_prob_traced))(x)
    assert batch.dtype == one.dtype == jnp.float32
    np.testing.assert_allclose(batch, fitted.log_prob(x), atol=1e-4)
    np.testing.assert_allclose(one, fitted.log_prob(x), atol=1e-4)
    np.testing.assert_allclose(
        jax.jit(fitted.log_proposal_traced)(x), fitted.log_proposal(x), atol=1e-4
    )


def test_draws_carry_both_densities(fitted: Regressed) -> None:
    """log f and log q at the draws are those of the fitted density; f is the wider one."""
    draws = fitted.draw(jax.random.key(3), 700)
    np.testing.assert_allclose(draws.log_q, fitted.log_prob(draws.theta), atol=1e-9)
    np.testing.assert_allclose(draws.log_f, fitted.log_proposal(draws.theta), atol=1e-9)
    with jax.enable_x64(True):
        f = mixture_log_prob(jax.tree.map(jnp.asarray, fitted.proposal), jnp.asarray(draws.theta))
    np.testing.assert_allclose(draws.log_f, f, atol=1e-8)
    w = np.exp(draws.log_q - draws.log_f)
    assert w.mean() == pytest.approx(1, abs=0.05)
    assert w.sum() ** 2 / (w**2).sum() / 700 > 0.5
    assert fitted.draws is not None
    assert np.mean(np.exp(fitted.draws.log_q - fitted.draws.log_f)) == pytest.approx(1)


def test_saved_and_loaded(fitted: Regressed, tmp_path: object) -> None:
    """`pack` holds numeric arrays and short strings; what comes back is the same density."""
    x = np.random.default_rng(5).standard_normal((20, 2))
    for each in (fitted, fit(cloud(lambda x: -0.5 * (x**2).sum(1), 300, 2))):
        np.savez(f"{tmp_path}/density.npz", **each.pack())
        with np.load(f"{tmp_path}/density.npz") as parts:
            back = unpack(dict(parts))
        np.testing.assert_array_equal(back.log_prob(x), each.log_prob(x))
        one, other = each.draw(jax.random.key(0), 64), back.draw(jax.random.key(0), 64)
        np.testing.assert_array_equal(one.theta, other.theta)
        assert (back.name, back.error, back.draws) == (each.name, each.error, None)


def test_the_last_fit_is_a_start(fitted: Regressed) -> None:
    """A fit from the last one is as good, and so is one from a density far away."""
    again = fit(cloud(skewed, 1200, 2, seed=4), previous=fitted)
    assert again.error < 0.02
    far = cloud(lambda x: skewed(x - 100), 1200, 2)
    moved = Cloud(far.theta + 100, (now := skewed(far.theta)), now - far.log_q + far.log_w)
    assert fit(moved, previous=fitted).error < 0.02


def test_particles_of_no_density_or_very_deep() -> None:
    """log q of -inf or -1e10 at some particles spoils nothing: mass and fit are right."""
    points = cloud(skewed, 1200, 2)
    outside = points.theta[:, 0] > 2.2
    for low in (-np.inf, -1e10):
        log_q = np.where(outside, low, points.log_q)
        log_w = np.where(outside, low, points.log_w)
        found = fit(Cloud(points.theta, log_q, log_w))
        assert found.error < 0.05
        assert abs(found.gain) < 0.2
        inside = points.theta[~outside][:100]
        truth = skewed(inside)
        assert np.std(found.log_prob(inside) - truth) < 0.2


def test_nothing_to_fit_is_said() -> None:
    """No particle with a finite log q."""
    with pytest.raises(NotFiniteError, match="log_q"):
        fit(Cloud(np.zeros((5, 2)), np.full(5, -np.inf), np.full(5, -np.inf)))


@pytest.mark.parametrize("n", [1, 3, 6, 8, 25])
def test_few_particles(n: int) -> None:
    """Fewer particles than a quadratic has coefficients, or hardly more: finite all the same."""
    found = fit(cloud(lambda x: -0.5 * (x**2).sum(1), n, 2), num_draws=100)
    draws = found.draw(jax.random.key(0), 100)
    assert all(np.isfinite(a).all() for a in draws)
    assert np.isfinite(found.log_prob(np.zeros((1, 2)))).all()


def test_one_dimension_and_a_constant_coordinate() -> None:
    """d = 1 works; a coordinate in which all particles agree is kept at what they agree on."""
    line = cloud(lambda x: -0.5 * x[:, 0] ** 2 - 0.1 * x[:, 0] ** 4, 500, 1)
    assert fit(line).error < 0.01
    points = cloud(skewed, 900, 2)
    theta = np.c_[points.theta, np.full(900, 3.0)]
    found = fit(points._replace(theta=theta))
    draws = found.draw(jax.random.key(0), 200)
    assert all(np.isfinite(a).all() for a in draws)
    np.testing.assert_allclose(draws.theta[:, 2], 3.0, atol=1e-3)
    assert found.error < 0.2


def test_mass_that_no_particle_saw_is_refused() -> None:
    """With nothing but particles of one side, whatever is kept has about their mass."""
    points = cloud(lambda x: 3 * np.tanh(2 * x[:, 0]) - 0.05 * (x**2).sum(1), 250, 2, scale=2.0)
    half = points.theta[:, 0] < 0.2
    found = fit(Cloud(*(a[half] for a in points)))
    assert found.gain < 0.4 or found.name == "quadratic"
    given_up = fit(points, give_up=0.0)
    assert given_up.name == "mixture"
    assert abs(given_up.gain) < 0.05


def test_moves_do_not_compile_anew(fitted: Regressed) -> None:
    """Other particles, other numbers of them within a size: the same compiled programs."""
    compiled: list[str] = []

    def listen(name: str, seconds: float, **_: object) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    warm = fit(cloud(skewed, 1199, 2), num_draws=900)
    jax.monitoring.register_event_duration_secs_listener(listen)
    for seed in range(3):
        warm = fit(cloud(skewed, 1150 + 10 * seed, 2, seed=seed), previous=warm, num_draws=950)
    assert len(compiled) == 0
