"""What a posterior gives back, against closed forms."""

import importlib.util
import itertools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known import COV, MEAN, certificate, gaussian_posterior, gaussians, log_mixture, weighted
from scipy import stats

from pmd.certificate import pareto_k
from pmd.errors import InputError, InputTypeError
from pmd.modes import parted
from pmd.posterior import Posterior
from pmd.seeds import seed_to_key
from pmd.structure import Structure

SD = np.sqrt(np.diag(COV))


@pytest.fixture(scope="module")
def gaussian() -> Posterior:
    return gaussian_posterior(density=gaussians(MEAN + 0.02, 1.05 * COV, error=0.05))


def structured(shapes: dict, constraints: dict | None = None) -> Structure:
    leaves = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return Structure.of(leaves, constraints)


@pytest.mark.parametrize("using", ["particles", "density"])
def test_moments_of_a_gaussian_by_either_estimate(gaussian: Posterior, using: str) -> None:
    error = gaussian.cloud.moments(using).standard_error
    assert (np.abs(gaussian.mean(using=using) - MEAN) < 4 * error).all()
    # Errors of sds and covariances are of the size of those of means, in sds.
    assert np.allclose(gaussian.std(using=using), SD, rtol=4 / np.sqrt(gaussian.ess))
    cov = gaussian.cov(using=using)
    assert np.allclose(np.sqrt(np.diag(cov)), gaussian.std(using=using))
    assert np.allclose(
        cov / np.outer(SD, SD), COV / np.outer(SD, SD), atol=4 / np.sqrt(gaussian.ess)
    )


def test_the_density_is_chosen_where_it_is_good_and_is_better(gaussian: Posterior) -> None:
    assert gaussian.using == "density"
    alone = gaussian.cloud.moments("particles").standard_error
    assert (gaussian.cloud.moments().standard_error < 0.5 * alone).all()
    poor = gaussian_posterior(density=gaussians(MEAN + 3, COV, error=0.05))
    assert poor.using == "particles"
    assert gaussian_posterior(density=gaussians(MEAN, COV, error=np.nan)).using == "particles"


def test_quantiles_and_hdi_of_a_gaussian(gaussian: Posterior) -> None:
    levels = np.array([0.05, 0.5, 0.95])
    exact = MEAN + np.outer(stats.norm.ppf(levels), SD)
    found = gaussian.quantile(levels)
    assert found.shape == (3, 2)
    # A quantile's error: sqrt(p (1 - p) / n) / density, below 2.2 sd / sqrt(n) here.
    tolerance = 4 * 2.2 / np.sqrt(2**14)
    assert np.allclose((found - exact) / SD, 0, atol=tolerance)
    assert np.allclose(gaussian.quantile(0.5), found[1])
    low, high = gaussian.hdi(0.9)
    # The shortest interval is flat in its place, its length is not.
    assert np.allclose((high - low) / SD, 2 * stats.norm.ppf(0.95), atol=2 * tolerance)
    assert np.allclose(gaussian.quantile([[0.5], [0.95]]).shape, (2, 1, 2))


def test_expectations_have_the_shape_of_the_function(gaussian: Posterior) -> None:
    rows = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    found = gaussian.expect(lambda theta: rows @ theta)
    assert np.allclose(found, rows @ np.asarray(gaussian.mean()), atol=1e-4)
    tail = gaussian.expect(lambda theta: theta[0] > MEAN[0] + 1, standard_error=True)
    assert abs(tail.value - stats.norm.sf(1)) < 4 * tail.standard_error
    assert isinstance(tail.value, float)
    assert gaussian.expect(lambda theta: theta[0], using="particles") == pytest.approx(
        gaussian.mean(using="particles")[0], abs=1e-6
    )


def test_prediction_has_mean_and_sd_for_every_row(gaussian: Posterior) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    found = gaussian.predict(lambda theta, row: row @ theta, rows)
    sd = np.sqrt(np.einsum("ij,jk,ik->i", rows, COV, rows))
    assert np.allclose(found.value, rows @ MEAN, atol=0.05)
    assert np.allclose(found.sd, sd, rtol=0.05)


def test_log_prob_of_one_and_of_many(gaussian: Posterior) -> None:
    exact = stats.multivariate_normal(MEAN + 0.02, 1.05 * COV).logpdf
    grid = np.random.default_rng(0).normal(size=(3, 7, 2))
    assert gaussian.log_prob(jnp.asarray(MEAN)) == pytest.approx(exact(MEAN), abs=1e-6)
    assert np.allclose(gaussian.log_prob(jnp.asarray(grid[0])), exact(grid[0]), atol=1e-4)
    assert np.allclose(gaussian.log_prob(grid), exact(grid))
    assert gaussian.log_prob(grid[:, :0]).shape == (3, 0)
    assert np.isnan(gaussian.log_prob(np.array([np.nan, 0.0])))
    assert gaussian.log_prob(np.array([np.inf, 0.0])) == -np.inf


@pytest.mark.parametrize("theta", [np.zeros(3), np.zeros((4, 3)), np.zeros(()), {"w": np.zeros(2)}])
def test_log_prob_names_a_wrong_shape(gaussian: Posterior, theta) -> None:
    with pytest.raises(InputError, match="theta"):
        gaussian.log_prob(theta)


def test_parameters_come_in_their_own_structure() -> None:
    Pair = namedtuple("Pair", "scale w")
    shapes = {
        "deep": [jax.ShapeDtypeStruct((2, 2), jnp.float32)],
        "b": jax.ShapeDtypeStruct((), jnp.float32),
    }
    rng = np.random.default_rng(0)
    theta = rng.normal(size=(300, 5))
    posterior = weighted(theta, np.zeros(300), np.zeros(300), structure=Structure.of(shapes))
    assert posterior.names == ["b", "deep.0[0,0]", "deep.0[0,1]", "deep.0[1,0]", "deep.0[1,1]"]
    assert np.allclose(posterior.mean()["deep"][0], theta[:, 1:].mean(0).reshape(2, 2))
    assert posterior.std()["b"].shape == ()
    assert posterior.quantile([0.1, 0.9])["deep"][0].shape == (2, 2, 2)
    assert posterior.particles["deep"][0].shape == (300, 2, 2)
    assert posterior.cov().shape == (5, 5)
    assert posterior.sample(7)["b"].shape == (7,)
    pair = Pair(jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32))
    named = weighted(theta, np.zeros(300), np.zeros(300), structure=Structure.of(pair))
    assert isinstance(named.mean(), Pair)
    assert named.expect(lambda p: p.scale) == pytest.approx(theta[:, 0].mean(), abs=1e-6)
    density = gaussians(np.zeros(5), np.eye(5))
    deep = weighted(theta, np.zeros(300), np.zeros(300), density, Structure.of(shapes))
    batch = {"deep": [np.zeros((6, 2, 2))], "b": np.zeros(6)}
    assert deep.log_prob(batch).shape == (6,)
    with pytest.raises(InputError, match=r"deep.0 has shape \(5, 2, 2\)"):
        deep.log_prob({"deep": [np.zeros((5, 2, 2))], "b": np.zeros(6)})


def log_normal_posterior(density_error: float = 0.0) -> Posterior:
    """log sigma ~ N(.5, .4^2) in free coordinates, beside a free number."""
    library = pytest.importorskip("numpyro.distributions")
    structure = structured({"sigma": (), "w": ()}, {"sigma": library.constraints.positive})
    rng = np.random.default_rng(0)
    mean, cov = np.array([0.5, 1.0]), np.diag([0.16, 1.0])
    theta = rng.multivariate_normal(mean, 1.5 * cov, 3000)
    exact = stats.multivariate_normal(mean, cov).logpdf(theta)
    drawn = stats.multivariate_normal(mean, 1.5 * cov).logpdf(theta)
    return weighted(theta, exact, drawn, gaussians(mean, cov, error=density_error), structure)


def test_a_constrained_parameter_is_stated_in_the_users_own_numbers() -> None:
    posterior = log_normal_posterior()
    exact = stats.lognorm(s=0.4, scale=np.exp(0.5))
    # 2^14 draws and their weights: an error of about .01 sd.
    assert posterior.mean()["sigma"] == pytest.approx(exact.mean(), abs=0.04 * exact.std())
    assert posterior.std()["sigma"] == pytest.approx(exact.std(), rel=0.05)
    assert posterior.quantile(0.95)["sigma"] == pytest.approx(exact.ppf(0.95), rel=0.02)
    assert (posterior.sample(500)["sigma"] > 0).all()
    assert posterior.expect(lambda t: jnp.log(t["sigma"])) == pytest.approx(0.5, abs=0.02)
    sigma = np.array([0.3, 1.0, 2.5])
    found = posterior.log_prob({"sigma": sigma, "w": np.ones(3)})
    assert np.allclose(found, exact.logpdf(sigma) + stats.norm.logpdf(0), atol=1e-6)
    assert posterior.log_prob({"sigma": -1.0, "w": 0.0}) == -np.inf
    assert posterior.log_prob({"sigma": 0.0, "w": 0.0}) == -np.inf


def test_a_simplex_has_more_numbers_than_coordinates() -> None:
    library = pytest.importorskip("numpyro.distributions")
    structure = structured({"p": (3,)}, {"p": library.constraints.simplex})
    theta = np.random.default_rng(0).normal(size=(400, 2))
    posterior = weighted(
        theta, np.zeros(400), np.zeros(400), gaussians(np.zeros(2), np.eye(2)), structure
    )
    assert posterior.names == ["p[0]", "p[1]", "p[2]"]
    assert posterior.mean(using="particles")["p"].sum() == pytest.approx(1.0)
    assert posterior.cov().shape == (3, 3)
    assert np.isfinite(posterior.log_prob({"p": np.array([0.2, 0.3, 0.5], np.float32)}))
    assert posterior.log_prob({"p": np.array([0.2, 0.3, 0.8])}) == -np.inf
    assert "p[2]" in str(posterior)


SHARES, CENTRES, SPREADS = (
    (0.3, 0.7),
    ([-3.0, 1.0], [2.0, -1.0]),
    (np.diag([0.3, 0.5]), np.eye(2) * 0.4),
)


@pytest.fixture(scope="module")
def bimodal() -> Posterior:
    rng = np.random.default_rng(0)
    which = rng.random(3000) < 0.5
    theta = np.where(
        which[:, None],
        rng.multivariate_normal(CENTRES[0], 1.3 * SPREADS[0], 3000),
        rng.multivariate_normal(CENTRES[1], 1.3 * SPREADS[1], 3000),
    )
    drawn = log_mixture(theta, CENTRES, [1.3 * s for s in SPREADS], (0.5, 0.5))
    exact = log_mixture(theta, CENTRES, SPREADS, SHARES)
    density = gaussians(CENTRES, np.stack(SPREADS) * 1.03, SHARES, error=0.05)
    return weighted(theta, exact, drawn, density)


def test_modes_by_mass_centre_and_sd(bimodal: Posterior) -> None:
    large, small = bimodal.modes()
    assert large.mass == pytest.approx(0.7, abs=0.01)
    assert small.mass == pytest.approx(0.3, abs=0.01)
    assert large.mass + small.mass == pytest.approx(1.0)
    assert np.allclose(large.centre, CENTRES[1], atol=0.03)
    assert np.allclose(small.sd, np.sqrt([0.3, 0.5]), rtol=0.06)
    text = str(bimodal)
    assert "mode" in text
    assert "0.70" in text


def test_one_bent_hill_is_one_mode() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=3000)
    theta = np.stack([x, x**2 + 0.5 * rng.normal(size=3000)], 1)
    log_q = -0.5 * x**2 - 2 * (theta[:, 1] - x**2) ** 2
    posterior = weighted(theta, log_q, log_q)
    assert len(posterior.modes()) == 1
    assert posterior.modes()[0].mass == pytest.approx(1.0)


def test_modes_of_weighted_atoms_need_no_density(bimodal: Posterior) -> None:
    large, small = bimodal.replace(density=None, atoms=True).modes()
    assert large.mass == pytest.approx(0.7, abs=0.03)
    assert np.allclose(small.centre, CENTRES[0], atol=0.1)


def test_modes_of_few_particles_far_apart() -> None:
    """Fewer particles in a mode than a particle has neighbours, and an empty valley between."""
    rng = np.random.default_rng(0)
    theta = np.concatenate([rng.normal(0, 1, (50, 3)), rng.normal(8, 1, (6, 3))])
    means, spreads, shares = ([0] * 3, [8] * 3), (np.eye(3), np.eye(3)), (0.9, 0.1)
    log_q = log_mixture(theta, means, spreads, shares)
    drawn = log_mixture(theta, means, spreads, (50 / 56, 6 / 56))
    density = gaussians(means, np.stack(spreads), shares, error=0.01)
    posterior = weighted(theta, log_q, drawn, density)
    assert [round(mode.mass, 1) for mode in posterior.modes()] == [0.9, 0.1]


@pytest.mark.parametrize("d", [1, 3, 20, 50])
def test_one_gaussian_is_one_mode_in_any_dimension(d: int) -> None:
    theta = np.random.default_rng(0).standard_normal((30 * d + 100, d))
    log_q = -0.5 * (theta**2).sum(1)
    for density in (None, gaussians(np.zeros(d), np.eye(d))):
        assert len(weighted(theta, log_q, log_q, density).modes()) == 1


def test_tops_on_the_way_between_two_modes_part_nothing() -> None:
    top = np.array([0.6, 1.0, -1.3, 0.9])
    lowest = np.array([  # the third lies between the first two, the fourth beside the second
        [0.6, -1.3, -1.3, -1.3],
        [-1.3, 1.0, -1.3, 0.8],
        [-1.3, -1.3, -1.3, -1.3],
        [-1.3, 0.8, -1.3, 0.9],
    ])  # fmt: skip
    label = parted(top, lowest)
    assert label[[0, 1, 3]].tolist() == [1, 0, 0]
    assert label[2] in (0, 1)
    assert parted(top[:1], lowest[:1, :1]).tolist() == [0]


def test_samples_have_equal_weight_and_the_right_moments(bimodal: Posterior) -> None:
    few, many = bimodal.sample(1000, seed=1), bimodal.sample(20_000, seed=1)
    assert len(np.unique(few, axis=0)) > 900  # particles, hardly any of them twice
    assert len(np.unique(many, axis=0)) > 15_000  # more than there are particles: from the density
    for draws in (few, many):
        share = np.mean(draws[:, 0] < 0)
        assert abs(share - 0.3) < 4 * np.sqrt(0.21 / min(len(draws), bimodal.ess))
    assert np.array_equal(few, bimodal.sample(1000, seed=1))
    assert not np.array_equal(few, bimodal.sample(1000, seed=2))
    assert bimodal.sample(0).shape == (0, 2)
    # Systematic draws come in random order: halves agree.
    assert abs((few[:500, 0] < 0).mean() - (few[500:, 0] < 0).mean()) < 4 * np.sqrt(2 * 0.21 / 500)


def test_atoms_have_no_density_and_say_what_to_do() -> None:
    atoms = gaussian_posterior(density=gaussians(MEAN, COV), atoms=True)
    assert atoms.using == "particles"
    with pytest.raises(InputError, match=r"kernel_estimate\(\)"):
        atoms.log_prob(MEAN)
    with pytest.raises(InputError, match="needs a fitted density"):
        atoms.mean(using="density")
    assert atoms.sample(5000).shape == (5000, 2)


@pytest.mark.skipif(not importlib.util.find_spec("pmd.densities.kernel"), reason="not there yet")
def test_a_kernel_estimate_of_atoms_has_a_density() -> None:
    smooth = gaussian_posterior(m=3000, atoms=True).kernel_estimate()
    exact = stats.multivariate_normal(MEAN, COV).logpdf(MEAN)
    assert smooth.log_prob(MEAN) == pytest.approx(exact, abs=0.2)
    assert np.allclose(smooth.mean(), gaussian_posterior(m=3000).mean())


def test_particles_of_zero_weight_do_no_harm() -> None:
    rng = np.random.default_rng(0)
    theta = rng.multivariate_normal(MEAN, COV, 1000)
    log_q = np.where(
        theta[:, 0] > MEAN[0], stats.multivariate_normal(MEAN, COV).logpdf(theta), -np.inf
    )
    drawn = stats.multivariate_normal(MEAN, COV).logpdf(theta)
    posterior = weighted(theta, log_q, drawn, gaussians(MEAN, COV, error=0.1))
    assert posterior.ess == pytest.approx((theta[:, 0] > MEAN[0]).sum())
    assert posterior.quantile(0.0, using="particles")[0] > MEAN[0]
    assert np.isfinite(posterior.mean(using="density")).all()


BAD = {
    "quantile above one": (lambda p: p.quantile(95), InputError, "q takes probabilities"),
    "quantile nan": (lambda p: p.quantile([0.1, np.nan]), InputError, "q takes probabilities"),
    "quantile text": (lambda p: p.quantile("median"), InputTypeError, "q takes probabilities"),
    "hdi of everything": (lambda p: p.hdi(1.0), InputError, "between 0 and 1"),
    "two hdis": (lambda p: p.hdi([0.5, 0.9]), InputError, "one number between 0 and 1"),
    "negative n": (lambda p: p.sample(-1), InputError, "n must not be negative"),
    "broken n": (lambda p: p.sample(2.5), InputTypeError, "whole number"),
    "key": (lambda p: p.sample(5, seed=jax.random.key(0)), InputTypeError, "not a key"),
    "old key": (lambda p: p.sample(5, seed=jax.random.PRNGKey(0)), InputTypeError, "not a key"),
    "float seed": (lambda p: p.sample(5, seed=1.0), InputTypeError, "seed= takes an integer"),
    "negative seed": (lambda p: p.sample(5, seed=-3), InputError, "from 0 to"),
    "true seed": (lambda p: p.sample(5, seed=True), InputTypeError, "seed= takes an integer"),
    "using": (lambda p: p.mean(using="fit"), InputError, "'particles' or 'density'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(gaussian: Posterior, case: str) -> None:
    call, error, words = BAD[case]
    with pytest.raises(error, match=words):
        call(gaussian)


def test_seeds_are_integers_of_any_kind() -> None:
    for seed in (7, np.int64(7), np.uint8(7)):
        assert (
            jax.random.key_data(seed_to_key(seed)) == jax.random.key_data(jax.random.key(7))
        ).all()


def test_weights_that_are_all_zero_are_refused() -> None:
    with pytest.raises(InputError, match="finite log-weights"):
        weighted(np.zeros((3, 1)), np.full(3, -np.inf), np.zeros(3))


def test_the_table_is_short_and_complete() -> None:
    rng = np.random.default_rng(0)
    theta = rng.normal(size=(200, 30)) * np.geomspace(1e-4, 1e4, 30)
    text = str(weighted(theta, np.zeros(200), np.zeros(200)))
    assert "... and 10 more" in text
    assert "theta[19]" in text
    assert "theta[20]" not in text
    assert max(map(len, text.splitlines())) <= 80
    for word in ("mean", "95%", "log-evidence", "evaluations", "5 passes", "Verdict"):
        assert word in text
    large = weighted(1e9 + theta[:, 15:16], np.zeros(200), np.zeros(200))
    assert "e+09" in str(large)
    assert repr(large) == str(large)


def test_to_dataframe_has_a_column_for_each_name(gaussian: Posterior) -> None:
    table = gaussian.to_dataframe()
    assert list(table) == ["theta[0]", "theta[1]", "log_weight"]
    w = np.exp(table["log_weight"])
    assert np.isclose(w @ table["theta[1]"], gaussian.mean(using="particles")[1])


def test_replace_changes_a_part_and_forgets_what_was_computed(gaussian: Posterior) -> None:
    gaussian.mean()
    other = gaussian.replace(log_q=gaussian.log_p0, certificate=certificate(pareto_k=0.9))
    assert other.ess == pytest.approx(gaussian.num_particles)
    assert other.certificate.verdict == "do not trust"
    assert pareto_k(other.log_weights)[0] < 0
    assert not np.allclose(other.std(using="particles"), gaussian.std(using="particles"))


def test_estimates_do_not_depend_on_the_order_of_calls() -> None:
    def values(order) -> dict:
        posterior = gaussian_posterior(m=300, density=gaussians(MEAN, COV, error=0.05))
        calls = {
            "mean": lambda: posterior.mean(),
            "draws": lambda: posterior.sample(50),
            "expect": lambda: posterior.expect(lambda t: t[0]),
            "print": lambda: np.array([hash(str(posterior)) % 2**31]),
        }
        return {name: calls[name]() for name in order}

    first, *others = [
        values(order)
        for order in itertools.islice(
            itertools.permutations(["mean", "draws", "expect", "print"]), 0, 24, 7
        )
    ]
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in first)
