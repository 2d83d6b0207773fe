"""Pictures: the right axes, drawn into what is given, never shown."""

import numpy as np
import pytest
from known import gaussian_posterior, weighted

from pmd.errors import InputError, InputTypeError
from pmd.plot import CELLS, select, smooth

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

NAMES = ["a", "w[0]", "w[1]", "w[2]"]


@pytest.fixture(autouse=True)
def close_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("plot must not show anything"))
    yield
    plt.close("all")


def many(dimension: int):
    theta = np.random.default_rng(0).normal(size=(300, dimension))
    return weighted(theta, np.zeros(300), np.zeros(300))


def test_a_corner_of_axes_with_labels_at_its_edges() -> None:
    axes = gaussian_posterior().plot()
    assert axes.shape == (2, 2)
    assert axes[1, 0].get_xlabel() == "theta[0]"
    assert axes[1, 0].get_ylabel() == "theta[1]"
    assert axes[1, 1].get_xlabel() == "theta[1]"
    assert axes[0, 0].get_xlabel() == ""
    assert not axes[0, 1].axison
    axes[0, 0].figure.canvas.draw()


def test_the_marginal_is_a_density() -> None:
    line = gaussian_posterior(m=4000).plot(0)[0, 0].lines[0]
    x, y = line.get_data()
    assert np.trapezoid(y, x) == pytest.approx(1.0, abs=0.01)
    # N(1, 1): the peak, within smoothing and the noise of 96 cells.
    assert y.max() == pytest.approx(0.399, abs=0.05)
    assert x[y.argmax()] == pytest.approx(1.0, abs=0.4)


def test_the_first_eight_of_many_are_shown_and_it_says_so() -> None:
    axes = many(11).plot()
    assert axes.shape == (8, 8)
    assert axes[0, 0].figure._suptitle.get_text() == "the first 8 of 11 numbers"
    chosen = many(11).plot(["theta[9]", 2])
    assert chosen[1, 0].get_xlabel() == "theta[9]"
    assert chosen[1, 0].get_ylabel() == "theta[2]"


def test_it_draws_into_axes_that_are_given() -> None:
    _, axes = plt.subplots(2, 2)
    again = gaussian_posterior().plot(ax=axes, truth=np.array([1.0, -2.0]), colour="C3")
    assert (again == axes).all()
    assert len(axes[1, 0].lines) == 2
    _, one = plt.subplots()
    assert gaussian_posterior().plot("theta[1]", ax=one)[0, 0] is one
    with pytest.raises(InputError, match="ax must hold 2 x 2"):
        gaussian_posterior().plot(ax=one)


def test_names_leaves_and_positions_select() -> None:
    assert select(NAMES, None) == [0, 1, 2, 3]
    assert select(NAMES, "w") == [1, 2, 3]
    assert select(NAMES, ["w[2]", "a", 0]) == [3, 0]
    assert select(NAMES, [-1]) == [3]
    for wrong in ("x", [7], []):
        with pytest.raises(InputError, match="parameters"):
            select(NAMES, wrong)
    with pytest.raises(InputTypeError, match="names or positions"):
        select(NAMES, [1.5])


def test_degenerate_particles_can_be_drawn() -> None:
    theta = np.ones((30, 2))
    theta[:, 1] = np.arange(30)
    log_q = np.full(30, -np.inf)
    log_q[4] = 0
    weighted(theta, np.zeros(30), np.zeros(30)).plot()[0, 0].figure.canvas.draw()
    weighted(theta, log_q, np.zeros(30)).plot()[0, 0].figure.canvas.draw()


def test_smoothing_keeps_mass_and_shrinks_with_more_points() -> None:
    histogram = np.zeros((CELLS, CELLS))
    histogram[48, 48] = 1.0
    few, lots = smooth(histogram, 50), smooth(histogram, 1e5)
    assert few.sum() == pytest.approx(1.0)
    assert few.max() < lots.max()
