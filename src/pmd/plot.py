"""Pictures of a posterior: a corner of marginals and pairs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmd.errors import InputError, InputTypeError, require
from pmd.estimates import quantiles

if TYPE_CHECKING:
    from pmd.posterior import Posterior

MOST = 8  # parameters shown unless asked for
CELLS = 96  # of a histogram, along each axis
MASSES = (0.95, 0.8, 0.5, 0.2)  # inside the contours of highest density
SPAN = (0.001, 0.999)  # quantiles that the axes reach to, and a little further
COLOUR = "#2b6cb0"


def corner(
    posterior: "Posterior",
    parameters: str | int | Sequence[str | int] | None = None,
    ax: Any = None,
    *,
    truth: Any = None,
    colour: str = COLOUR,
    size: float = 2.1,
) -> Any:
    """Marginal densities on the diagonal, pairs below: contours that hold 20, 50, 80 and 95 %.

    Args:
        posterior: what `fit` returned.
        parameters: names ("w[0]"), leaves ("w"), or positions; by default the first eight numbers.
        ax: axes to draw into, (n, n) for n parameters, or one for one; made if not given.
        truth: a parameter in its own structure, marked by lines.
        colour: of lines and fillings.
        size: inches for each parameter, where axes are made.

    Returns:
        the (n, n) array of axes; nothing is shown.
    """
    pyplot = require("matplotlib.pyplot", "plot")
    chosen = select(posterior.names, parameters)
    n = len(chosen)
    if ax is None:
        side = max(size * n, 3.2)
        _, axes = pyplot.subplots(n, n, figsize=(side, side), squeeze=False, layout="constrained")
    else:
        axes = np.asarray(ax, dtype=object).reshape(-1)
        if axes.size != n * n:
            raise InputError(f"ax must hold {n} x {n} axes for {n} parameters, got {axes.size}")
        axes = axes.reshape(n, n)
    plain, _, weights = posterior.cloud.measure()
    ends = spans(plain[:, chosen], weights)
    marks = None if truth is None else posterior.cloud.parameters.flatten(truth)[0][0, chosen]
    names = [posterior.names[j] for j in chosen]
    # Of two numbers the fitted density can be drawn itself; more would have to be integrated out.
    whole = chosen == [0, 1] == list(range(len(posterior.names))) and posterior.using == "density"
    for i in range(n):
        for j in range(n):
            panel = axes[i, j]
            if j > i:
                panel.set_axis_off()
                continue
            x, y = plain[:, chosen[j]], plain[:, chosen[i]]
            box = ends[[j, i]]
            if i == j:
                marginal(panel, x, weights, ends[i], colour)
            elif whole:
                contours(panel, exact(posterior, box), box, colour)
            else:
                contours(panel, joint(x, y, weights, box), box, colour)
            if marks is not None:
                mark(panel, marks[j], None if i == j else marks[i])
            dress(panel, names[j] if i == n - 1 else "", names[i] if j == 0 < i else "", i == j)
    more = len(posterior.names) - n
    if parameters is None and more and ax is None:
        axes[0, 0].figure.suptitle(f"the first {n} of {n + more} numbers", fontsize=9)
    return axes


def select(names: list[str], parameters: str | int | Sequence[str | int] | None) -> list[int]:
    """Positions of the numbers asked for."""
    if parameters is None:
        return list(range(min(len(names), MOST)))
    wanted = [parameters] if isinstance(parameters, str | int) else list(parameters)
    chosen: list[int] = []
    for name in wanted:
        if isinstance(name, str):
            found = [j for j, known in enumerate(names) if known == name or leaf(known) == name]
            if not found:
                raise InputError(f"parameters: there is no {name!r} among {', '.join(names[:20])}")
            chosen += found
        elif isinstance(name, int | np.integer) and not isinstance(name, bool):
            if not -len(names) <= name < len(names):
                raise InputError(f"parameters: position {name} of {len(names)} numbers")
            chosen.append(int(name) % len(names))
        else:
            raise InputTypeError(f"parameters takes names or positions, not {name!r}")
    if not chosen:
        raise InputError("parameters is empty: name at least one")
    return list(dict.fromkeys(chosen))


def leaf(name: str) -> str:
    """The leaf that a number belongs to: "w" of "w[3]"."""
    return name.partition("[")[0]


def spans(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Lower and upper end of every column's axis, (columns, 2)."""
    low, high = quantiles(x, weights, np.array(SPAN))
    pad = 0.08 * (high - low)
    pad = np.where(pad > 0, pad, np.maximum(np.abs(low), 1.0))
    return np.stack([low - pad, high + pad], 1)


def smooth(histogram: np.ndarray, effective: float) -> np.ndarray:
    """A histogram under a Gaussian whose width falls with the effective number of points."""
    from scipy.ndimage import gaussian_filter

    axes = histogram.ndim
    # Scott's rule, for points whose sd is a sixth of the span.
    width = max(0.8, CELLS / 6 * effective ** (-1 / (axes + 4)) / 1.3)
    return np.maximum(gaussian_filter(histogram, width, mode="nearest"), 0.0)


def number_of(weights: np.ndarray) -> float:
    """Effective number of points of weights, a few of which may be negative."""
    return float(1 / (weights @ weights))


def marginal(panel: Any, x: np.ndarray, weights: np.ndarray, ends: np.ndarray, colour: str) -> None:
    """The density of one number as a filled line."""
    mass, edges = np.histogram(x, CELLS, tuple(ends), weights=weights)
    density = smooth(mass, number_of(weights)) / (edges[1] - edges[0])
    panel.fill_between(middle(ends), density, color=colour, alpha=0.25, linewidth=0)
    panel.plot(middle(ends), density, color=colour, linewidth=1.4)
    panel.set_xlim(*ends)
    panel.set_ylim(0, 1.12 * density.max())


def joint(x: np.ndarray, y: np.ndarray, weights: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The smoothed joint density of two numbers on a grid of cells."""
    mass, _, _ = np.histogram2d(x, y, CELLS, tuple(map(tuple, ends)), weights=weights)
    return smooth(mass, number_of(weights))


def exact(posterior: "Posterior", ends: np.ndarray) -> np.ndarray:
    """The fitted density itself on the same grid, where two numbers are all there are."""
    x, y = np.meshgrid(*map(middle, ends), indexing="ij")
    theta = posterior.cloud.parameters.tree(np.stack([x.ravel(), y.ravel()], 1))
    log_prob = posterior.log_prob(theta)
    return np.exp(log_prob - log_prob.max()).reshape(CELLS, CELLS)


def middle(ends: np.ndarray) -> np.ndarray:
    """Middles of the cells of an axis."""
    edges = np.linspace(ends[0], ends[1], CELLS + 1)
    return 0.5 * (edges[1:] + edges[:-1])


def contours(panel: Any, density: np.ndarray, ends: np.ndarray, colour: str) -> None:
    """Filled contours of highest density."""
    from matplotlib.colors import to_rgba

    falling = np.sort(density.ravel())[::-1]
    inside = np.cumsum(falling) / falling.sum()
    levels = np.unique([falling[np.searchsorted(inside, share)] for share in MASSES])
    shades = [to_rgba(colour, shade) for shade in np.linspace(0.15, 0.75, len(levels))]
    x, y = map(middle, ends)
    panel.contourf(x, y, density.T, [*levels, 1.01 * density.max()], colors=shades)
    panel.contour(x, y, density.T, levels, colors=[colour], linewidths=0.6)
    panel.set_xlim(*ends[0])
    panel.set_ylim(*ends[1])


def mark(panel: Any, x: float, y: float | None) -> None:
    """Lines at the truth."""
    style = {"color": "0.2", "linewidth": 0.9, "linestyle": "--"}
    panel.axvline(x, **style)
    if y is not None:
        panel.axhline(y, **style)


def dress(panel: Any, below: str, beside: str, diagonal: bool) -> None:
    """Labels at the outer axes only, few ticks, no box that is not needed."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(3))
    panel.yaxis.set_major_locator(MaxNLocator(3))
    panel.tick_params(labelsize=8, labelbottom=bool(below), labelleft=bool(beside))
    panel.set_xlabel(below)
    panel.set_ylabel(beside)
    for side in ("top", "right", *(("left",) if diagonal else ())):
        panel.spines[side].set_visible(False)
    if diagonal:
        panel.set_yticks([])
