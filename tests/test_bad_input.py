"""Everything that can be wrong is said before any long work: argument, value and cure."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets
from numpyro.distributions import constraints as on

import pmd
from pmd.errors import InputError, InputTypeError, PmdError

X = np.linspace(-1, 1, 40).astype(np.float32)


def normal(t: Any, sd: float = 1.0) -> Any:
    return targets.log_normal(t, sd)


def problem(**changes: Any) -> pmd.Problem:
    """The mean of a Gaussian, but for the changes."""
    given: dict[str, Any] = {
        "log_prior": normal,
        "log_likelihood": lambda t, row: normal(row - t),
        "sample_prior": lambda key: jax.random.normal(key),
    }
    return pmd.Problem(**(given | changes))


class Worked(Exception):
    """A run was begun."""


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong has to be found before the first step."""

    def refuse(*_: Any) -> None:
        raise Worked

    monkeypatch.setattr("pmd.run.Run.minibatches", refuse)


def fit(data: Any = X, *, of: pmd.Problem | None = None, **given: Any) -> pmd.Posterior:
    return pmd.fit(problem() if of is None else of, data, progress=False, **given)


def raises(kind: type[Exception], message: str, work: Callable[[], Any]) -> None:
    """The error is pmd's own, of the usual Python kind too, and says so much."""
    with pytest.raises(kind, match=message) as caught:
        work()
    assert isinstance(caught.value, PmdError)
    assert isinstance(caught.value, ValueError | TypeError)


def test_good_input_is_let_through() -> None:
    with pytest.raises(Worked):
        fit()


# ------------------------------------------------------------------ arguments of fit


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_particles": 0}, "num_particles must be at least 1, got 0"),
        ({"batch_size": 41}, "batch_size is 41, but there are only 40 rows: give at most 40"),
        ({"passes": -2}, "passes must be at least 0 and finite, got -2"),
        ({"until": "done"}, "until must be None or \"certified\", got 'done'"),
        ({"seed": -1}, "seed= takes an integer from 0"),
        ({"exact": "yes"}, 'exact must be "auto", "never" or "always"'),
        ({"evaluations": -1}, "evaluations must be at least 0"),
        ({"seconds": -1}, "seconds must be at least 0"),
    ],
)
def test_values_of_arguments(given: Any, message: str) -> None:
    raises(InputError, message, lambda: fit(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": jax.random.key(0)}, "seed= takes an integer such as 0, not a key"),
        ({"seed": np.array([0, 1], np.uint32)}, "seed= takes an integer such as 0, not a key"),
        ({"seed": 1.5}, "seed= takes an integer such as 0, not 1.5"),
        ({"num_particles": 100.0}, "num_particles must be a whole number, got 100.0"),
        ({"callback": 3}, "callback must be a function of one record, got 3"),
        ({"start": lambda key: 0.0}, r"start must be two functions"),
        ({"density": "regression"}, "density must be one of pmd.densities"),
        ({"rejuvenate": "never"}, "rejuvenate must be a policy"),
    ],
)
def test_kinds_of_arguments(given: Any, message: str) -> None:
    raises(InputTypeError, message, lambda: fit(**given))


def test_the_problem_has_to_be_one() -> None:
    raises(InputTypeError, "problem must be a pmd.Problem, got function",
           lambda: pmd.fit(cast(Any, normal), X))  # fmt: skip


# ------------------------------------------------------------------ data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data is empty"),
        (np.zeros(0), "data has no rows"),
        ((X, X[:-1]), r"data\[0\] has 40, data\[1\] has 39"),
        (np.where(X > 0.9, np.nan, X), r"data has NaN or infinite values in 2 rows \(row 38, 39\)"),
        (np.where(X > 0.95, np.inf, X), "data has NaN or infinite values in 1 rows"),
    ],
)
def test_data(data: Any, message: str) -> None:
    raises(InputError, message, lambda: fit(data))


# ------------------------------------------------------------------ what a problem is made of


def test_a_problem_needs_functions() -> None:
    raises(InputTypeError, "log_prior must be a function, got 0.0", lambda: problem(log_prior=0.0))
    raises(InputTypeError, "sample_prior must be a function, got None",
           lambda: problem(sample_prior=None))  # fmt: skip
    raises(InputError, "exactly one of log_likelihood", lambda: problem(log_likelihood=None))
    raises(InputError, "exactly one of log_likelihood",
           lambda: problem(log_likelihood_batch=lambda t, rows: normal(rows - t)))  # fmt: skip
    raises(InputTypeError, "start must be two functions", lambda: problem(start=(normal,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_likelihood": lambda t, row: normal(row - t)[None]},
         r"log_likelihood must return one number .* shape \(1,\): sum over its axes"),
        ({"log_likelihood": lambda t, row: normal(row["x"] - t)}, "log_likelihood failed on arg"),
        ({"log_likelihood": lambda t: normal(t)}, "log_likelihood failed on arguments of shapes"),
        ({"log_likelihood": None, "log_likelihood_batch": lambda t, rows: normal(rows - t).sum()},
         r"log_likelihood_batch must return one value a row, shape \(3,\) here, got .* shape \(\)"),
        ({"log_prior": lambda t: jnp.stack([t, t])}, r"log_prior must return one number .*\(2,\)"),
        ({"log_prior": lambda t: t["w"]}, "log_prior failed on arguments of shapes float32"),
        ({"sample_prior": lambda key: jnp.zeros((2,))}, r"log_prior must return one number"),
        ({"sample_prior": lambda key: ()}, "sample_prior returned no parameter at all"),
        ({"sample_prior": lambda: 0.0}, "sample_prior could not be called with a random key"),
        ({"start": (lambda key: jnp.zeros((2,)), normal)}, "start draws parameters"),
        ({"start": (lambda key: jax.random.normal(key), lambda t: jnp.stack([t, t]))},
         "start must return one number"),
        ({"constraints": {"scale": on.positive}}, r"constraints name \['scale'\]"),
    ],
)  # fmt: skip
def test_shapes_and_structures(changes: Any, message: str) -> None:
    raises(InputError, message, lambda: fit(of=problem(**changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_likelihood": lambda t, row: normal(row - t) + 0j},
         "log_likelihood returned a complex number; log-densities are real"),
        ({"log_prior": lambda t: jnp.asarray(t, complex)}, "log_prior returned a complex number"),
        ({"log_likelihood": lambda t, row: None}, "log_likelihood must return one number .* None"),
        ({"log_likelihood": lambda t, row: (t, row)}, "log_likelihood must return one number"),
        ({"sample_prior": lambda key: jax.random.randint(key, (), 0, 5)},
         "sample_prior returned int32 numbers for the parameter"),
        ({"sample_prior": lambda key: {"k": jnp.array(True), "x": jnp.zeros(())}},
         "sample_prior returned bool numbers for k"),
        ({"constraints": "positive"}, "constraints must be NumPyro constraints"),
    ],
)  # fmt: skip
def test_kinds_of_values(changes: Any, message: str) -> None:
    raises(InputTypeError, message, lambda: fit(of=problem(**changes)))


# ------------------------------------------------------------------ values at draws of the prior


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_likelihood": lambda t, row: jnp.sqrt(t) + row},
         r"log_likelihood is nan at row 0 under -?\d.*, a draw of sample_prior: return -inf"),
        ({"log_likelihood": lambda t, row: jnp.where(t > 0, jnp.inf, row)},
         "log_likelihood is inf at row 0 under"),
        ({"log_likelihood": lambda t, row: -jnp.inf * jnp.exp(t + row)},
         "log_likelihood is -inf for every one of 4160 draws of sample_prior.*widen the prior"),
        ({"log_prior": lambda t: jnp.log(t)}, r"log_prior is nan at -?\d.*, a draw of sample"),
        ({"log_prior": lambda t: jnp.where(t > 0, normal(t), -jnp.inf)},
         r"log_prior is -inf at .* \(and at \d+ of 64\).* must not draw"),
        ({"sample_prior": lambda key: jnp.log(jax.random.normal(key))},
         "sample_prior drew NaN or infinite parameters$"),
        ({"constraints": on.positive},
         "sample_prior drew NaN or infinite parameters, or some outside their constraints"),
        ({"start": (lambda key: jax.random.normal(key), lambda t: jnp.log(t))},
         "start is nan at .*, a draw of start"),
        ({"start": (lambda key: jax.random.normal(key),
                    lambda t: jnp.where(t > 0, normal(t), -jnp.inf))},
         "start is -inf at .* must not draw"),
    ],
)  # fmt: skip
def test_values_at_draws(changes: Any, message: str) -> None:
    raises(InputError, message, lambda: fit(of=problem(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        # impossible for half of the particles
        {"log_likelihood": lambda t, row: jnp.where(t > 0, -t * row, -jnp.inf)},
        # possible for few: about 2 % of the draws
        {"log_likelihood": lambda t, row: jnp.where(t > 2, -t * row, -jnp.inf)},
        # a start that goes beyond the support of the prior
        {"log_prior": lambda t: jnp.where(abs(t) < 1, -jnp.log(2.0), -jnp.inf),
         "sample_prior": lambda key: jax.random.uniform(key, (), jnp.float32, -1.0, 1.0),
         "start": (lambda key: 2 * jax.random.normal(key), lambda t: normal(t, 2.0))},
        {"log_likelihood": lambda t, row: 1},  # a whole number is a number
    ],
    ids=["some impossible", "most impossible", "start beyond the prior", "integer"],
)  # fmt: skip
def test_what_is_legal(changes: Any) -> None:
    with pytest.raises(Worked):
        fit(of=problem(**changes))


# ------------------------------------------------------------------ too few particles


def many(dimension: int) -> pmd.Problem:
    return problem(
        log_prior=lambda t: normal(t).sum(),
        log_likelihood=lambda t, row: normal(row - t[0]),
        sample_prior=lambda key: jax.random.normal(key, (dimension,)),
    )


def test_fewer_particles_than_coefficients_is_said_before_the_run() -> None:
    """A quadratic in 10 dimensions has 66."""
    with (
        pytest.warns(
            UserWarning, match="65 particles are fewer than the 66 coeff.*num_particles=99"
        ),
        pytest.raises(Worked),
    ):
        fit(of=many(10), num_particles=65)


def test_a_budget_too_small_for_the_problem_is_said() -> None:
    with pytest.warns(UserWarning, match="evaluations=100 pays for no more"), pytest.raises(Worked):
        fit(of=many(10), evaluations=100)


def test_enough_particles_and_other_densities_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Worked):
            fit(of=many(10), num_particles=66)
        with pytest.raises(Worked):
            fit(of=many(10), num_particles=5, density=pmd.densities.kernel())


# ------------------------------------------------------------------ an algorithm of one's own


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"num_data": 0}, InputError, "num_data must be at least 1, got 0"),
        ({"num_data": 10.0}, InputTypeError, "num_data must be a whole number"),
        ({"num_particles": None}, InputTypeError, "num_particles must be a whole number"),
        ({"num_particles": 0}, InputError, "num_particles must be at least 1"),
        ({"step_size": 2.0}, InputError, "step_size is a mixing fraction"),
        ({"density": "kernel"}, InputTypeError, "density must be one of"),
        ({"problem": None}, InputTypeError, "problem must be a pmd.Problem, got NoneType"),
    ],
)
def test_mirror_descent_checks_too(given: Any, kind: type[Exception], message: str) -> None:
    arguments = {"problem": problem(), "num_data": 40} | given
    raises(kind, message, lambda: pmd.mirror_descent(**arguments))
