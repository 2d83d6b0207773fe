"""The certificate: Pareto k beside ArviZ's, the rules of the verdict one by one, the paragraph."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known import certificate

from pmd.certificate import pareto_k

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import arviz


@pytest.mark.parametrize("m", [25, 60, 500, 20_000])
@pytest.mark.parametrize("scale", [0.001, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("kind", ["normal", "cauchy"])
def test_pareto_k_is_that_of_arviz(m: int, scale: float, kind: str) -> None:
    rng = np.random.default_rng(m)
    draw = rng.standard_normal if kind == "normal" else rng.standard_cauchy
    log_weights = scale * draw(m)
    smoothed, k = arviz.psislw(log_weights.copy())
    ours, ours_smoothed = pareto_k(log_weights)
    assert math.isclose(ours, float(k), rel_tol=1e-6, abs_tol=1e-6)
    assert np.allclose(ours_smoothed, np.asarray(smoothed), atol=1e-8)


@pytest.mark.parametrize("k", [0.2, 0.5, 0.9])
def test_pareto_k_of_pareto_weights(k: float) -> None:
    # The estimate's sd is (1 + k) / sqrt(tail); the prior pulls it towards .5 by 10 / (tail + 10).
    tail = 3 * math.sqrt(40_000)
    found = np.random.default_rng(1).pareto(1 / k, 40_000)
    sd = (1 + k) / math.sqrt(tail)
    assert abs(pareto_k(np.log1p(found))[0] - k) < 3 * sd + 10 * abs(k - 0.5) / tail


GOOD = [
    np.zeros(100),
    np.zeros(1500) + 1e-13 * np.arange(1500),
    np.full(3, -7.0),
    np.r_[np.zeros(400), -np.arange(100.0)],  # the largest weights are equal: bounded
]
POOR = [
    np.zeros(0),
    np.array([0.0]),
    np.r_[0.0, np.full(99, -np.inf)],
    np.r_[np.arange(4.0), np.full(400, -np.inf)],
    np.full(10, -np.inf),
    np.r_[np.nan, np.zeros(50)],
]


@pytest.mark.parametrize("log_weights", GOOD, ids=range(len(GOOD)))
def test_equal_weights_are_as_good_as_can_be(log_weights: np.ndarray) -> None:
    assert pareto_k(log_weights)[0] == -math.inf


@pytest.mark.parametrize("log_weights", POOR, ids=range(len(POOR)))
def test_too_few_weights_are_not_called_good(log_weights: np.ndarray) -> None:
    assert pareto_k(log_weights)[0] == math.inf


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-800, 800) | st.just(-math.inf), min_size=1, max_size=80))
def test_pareto_k_is_never_nan_and_weights_sum_to_one(values: list[float]) -> None:
    log_weights = np.array(values)
    k, smoothed = pareto_k(log_weights)
    assert not math.isnan(k)
    if np.isfinite(log_weights).any():
        assert math.isclose(np.exp(smoothed).sum(), 1.0, rel_tol=1e-9)


RULES = [
    ({}, "trust", "weights are exact"),
    # Pareto k
    ({"pareto_k": 0.49}, "trust", "below 0.5"),
    ({"pareto_k": 0.5}, "means only", "tails"),
    ({"pareto_k": 0.69}, "means only", "tails"),
    ({"pareto_k": 0.7}, "do not trust", "few particles carry"),
    ({"pareto_k": math.inf}, "do not trust", "few particles carry"),
    ({"pareto_k": math.nan}, "do not trust", "few particles carry"),
    ({"pareto_k": -math.inf}, "trust", "below 0.5"),
    ({"pareto_k": 0.46, "num_particles": 60, "ess": 55}, "means only", "not below 0.44"),
    # How well means are known: e / sqrt(ess)
    ({"ess": 100, "fit_error": math.nan}, "means only", "about 0.1 posterior sd"),
    ({"ess": 99, "fit_error": math.nan}, "do not trust", "about 0.1 posterior sd"),
    ({"ess": 900, "fit_error": math.nan}, "means only", "0.033"),
    ({"ess": 950, "fit_error": math.nan}, "trust", "0.032"),
    ({"ess": 950, "fit_error": 3.0}, "means only", "off by 3 nats"),
    ({"fit_error": 0.21}, "trust", "weights are exact"),  # .15 sqrt 2 = .212
    ({"fit_error": 0.22}, "means only", "off by 0.22 nats"),
    ({"ess": 80, "fit_error": 0.01, "num_particles": 100}, "trust", "0.011"),
    ({"ess": 80, "fit_error": 0.5, "num_particles": 100}, "means only", "0.056"),
    # Whether tails and modes may have been missed
    ({"ess": 79, "fit_error": 0.01, "num_particles": 100}, "means only", "it takes 80"),
    ({"ess": 39, "fit_error": 0.01, "num_particles": 60}, "do not trust", "it takes 80"),
    ({"ess": 119, "num_modes": 3, "num_particles": 200}, "means only", "it takes 120 (3 clusters"),
    ({"ess": 120, "num_modes": 3, "num_particles": 200}, "trust", "120 of 200"),
    ({"ess": 59, "num_modes": 3, "num_particles": 60}, "do not trust", "it takes 120"),
    ({"ess": 290, "num_particles": 6000}, "means only", "too small a share"),
    # 90 particles and 136 coefficients of a quadratic: the fit's error is worth nothing.
    ({"ess": 90, "fit_error": 0.01, "num_particles": 90, "dimension": 15}, "do not trust", "0.11"),
    ({"ess": 0.0}, "do not trust", "effective sample size of 0"),
    ({"ess": math.nan}, "do not trust", "not finite"),
    ({"log_evidence": -math.inf}, "do not trust", "not finite"),
    # No exact last step
    ({"exact_last": False, "minibatch_noise": 0.01, "guarded": 0}, "trust", "not an exact one"),
    ({"exact_last": False, "minibatch_noise": 0.01, "guarded": 1}, "means only", "guard"),
    ({"exact_last": False, "minibatch_noise": 0.06, "guarded": 0}, "means only", "0.063 nats"),
    ({"exact_last": False, "minibatch_noise": 0.2, "guarded": 0}, "do not trust", "0.2 nats"),
    ({"exact_last": False, "minibatch_noise": math.nan}, "do not trust", "not known"),
    ({"exact_last": False, "fit_error": math.nan, "guarded": 0}, "means only", "not measured"),
    ({"exact_last": False, "fit_error": 0.1, "guarded": 0}, "means only", "0.1 nats"),
    (
        {"exact_last": False, "fit_error": math.nan, "kept": 0, "guarded": 0},
        "trust",
        "not an exact",
    ),
    # Modes
    ({"exact": "never", "num_modes": 2}, "do not trust", "2 components"),
    ({"exact": "never", "num_modes": 2, "second_run": "agrees"}, "trust", "second run agrees"),
    ({"exact": "never", "num_modes": 1}, "trust", "No poor fit"),
    ({"exact": "never", "worst_kept_error": math.nan}, "means only", "were not measured"),
    ({"exact": "never", "worst_kept_error": math.nan, "kept": 0}, "trust", "No poor fit"),
    ({"exact": "auto", "num_modes": 6}, "trust", "No poor fit"),
    ({"worst_kept_error": 0.70}, "trust", "No poor fit"),
    ({"worst_kept_error": 0.71}, "means only", "0.71 nats was kept"),
    ({"worst_kept_error": 0.71, "second_run": "agrees"}, "trust", "second run agrees"),
    ({"unchecked_poor_fits": 1}, "means only", "1 poor fit went unchecked"),
    ({"unchecked_poor_fits": 2}, "means only", "2 poor fits went unchecked"),
    ({"unchecked_poor_fits": 2, "second_run": "agrees"}, "trust", "second run agrees"),
    ({"second_run": "disagrees"}, "do not trust", "pools both"),
    ({"second_run": "agrees", "pareto_k": 0.8}, "do not trust", "few particles carry"),
    # Updates
    ({"earlier_verdict": "trust", "earlier_error": 0.04}, "trust", "Earlier rows"),
    ({"earlier_verdict": "trust", "earlier_error": 0.05}, "means only", "0.05 nats"),
    ({"earlier_verdict": "trust", "earlier_error": math.nan}, "do not trust", "nan nats"),
    ({"earlier_verdict": "means only"}, "means only", "Earlier rows"),
    ({"earlier_verdict": "do not trust"}, "do not trust", "Earlier rows"),
]


@pytest.mark.parametrize(("changes", "verdict", "word"), RULES)
def test_rules_of_the_verdict(changes: dict, verdict: str, word: str) -> None:
    found = certificate(**changes)
    assert found.verdict == verdict
    assert any(word in reason for reason in found.reasons)


def test_reasons_name_only_what_stands_against_the_result_gravest_first() -> None:
    found = certificate(pareto_k=0.6, second_run="disagrees")
    assert ["second run" in reason for reason in found.reasons] == [True, False]
    assert len(certificate().reasons) == 5


BAD = [0.0, math.nan, math.inf, -math.inf, 1e9, -1.0]


@given(st.sampled_from(BAD), st.sampled_from(BAD), st.sampled_from(BAD), st.booleans())
def test_no_figure_breaks_the_paragraph(k: float, ess: float, error: float, last: bool) -> None:
    found = certificate(
        pareto_k=k, ess=ess, fit_error=error, exact_last=last, minibatch_noise=error
    )
    assert str(found).startswith(f"Verdict: {found.verdict}.")
    if not math.isfinite(ess) or ess <= 0:
        assert found.verdict == "do not trust"


def test_the_paragraph_wraps_and_says_it_all() -> None:
    note = "A budget of 300 evaluations is small for 6 dimensions."
    text = str(certificate(warnings=(note,), unseen_mass=0.001, second_run="agrees"))
    assert max(map(len, text.splitlines())) <= 80
    assert "\n\n" not in text
    flat = text.replace("\n", " ")
    for piece in ("Verdict: trust.", "1200 of 1500", "2 re-weighed", "1 guarded step", note):
        assert piece in flat
