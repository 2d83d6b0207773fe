"""The paper's figure: true posterior, estimate, total variation, cross entropy."""

from pathlib import Path
from typing import Any

import numpy as np

from pmd.errors import require
from pmd.experiments.mixture import FLOOR, FLOOR_REPLACE, Result, Strategy
from pmd.experiments.mixture_report import NAMES, mean, series

# Okabe and Ito's colours, told apart by everyone; shapes and dashes say the same again.
STYLES: dict[str, dict[str, Any]] = {
    Strategy.DEFAULT: {"color": "#D55E00", "marker": "o", "linewidth": 2.4, "zorder": 5},
    Strategy.NEVER: {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    Strategy.EVERY_STEP: {"color": "#CC79A7", "marker": "^", "linestyle": "-."},
    Strategy.SWITCH: {"color": "#009E73", "marker": "D", "linestyle": (0, (4, 1, 1, 1, 1, 1))},
    FLOOR: {"color": "#333333", "linewidth": 1.2},
    FLOOR_REPLACE: {"color": "#999999", "linewidth": 0.9},
}
SIDE = 3.2  # of the square that is shown: all the mass lies within


SHOWN = (Strategy.DEFAULT, Strategy.EVERY_STEP, Strategy.SWITCH, Strategy.NEVER)
"""Whose estimates are drawn beside the truth: the first two of those that were run."""


def save(result: Result, path: Path) -> None:
    """Draw the figure and write it as PNG."""
    figure_module = require("matplotlib.figure", "cli")
    figure = figure_module.Figure(figsize=(9.2, 7.0), layout="constrained")
    axes = figure.subplot_mosaic("AABBCC;DDDEEE", height_ratios=(1.0, 1.15))
    top = float(np.exp(result.truth.log_density).max())
    density(axes["A"], result, result.truth.log_density, top)
    axes["A"].set_title("(1) True posterior", loc="left")
    axes["A"].set_ylabel("θ₂")
    told = "lines: 50, 90, 99 %\nof the truth"
    axes["A"].annotate(told, (-SIDE + 0.15, -0.6), va="center", color="#555555", fontsize=8)
    shown = [strategy for strategy in SHOWN if strategy in result.estimates][:2]
    for place, strategy in zip("BC", shown, strict=False):
        density(axes[place], result, result.estimates[strategy], top)
        axes[place].set_title(f"(2) Estimate: {NAMES[strategy].partition(':')[0]}", loc="left")
    if len(shown) < 2:
        axes["C"].set_axis_off()
    curves(axes["D"], result, "total_variation")
    axes["D"].set_title("(3) Total variation", loc="left")
    curves(axes["E"], result, "kl")
    axes["E"].set_title("(4) Cross entropy above the truth's, nats", loc="left")
    handles, labels = axes["D"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def density(ax: Any, result: Result, log_density: np.ndarray, top: float) -> None:
    """One density as shades, the truth's regions as lines, and the mass of each mode beside it."""
    axis = result.grid.axis
    values, truth = (
        np.exp(logs).reshape(len(axis), len(axis))
        for logs in (log_density, result.truth.log_density)
    )
    levels = np.linspace(top / 40, top, 24)  # nothing under the least: the page stays white
    ax.contourf(axis, axis, values.T, levels, cmap=shades(), extend="max")
    ax.contour(axis, axis, truth.T, regions(result), colors="#333333", linewidths=0.6)
    ax.set(xlim=(-SIDE, SIDE), ylim=(-SIDE, SIDE), aspect="equal", xlabel="θ₁")
    mass = values[:, axis < 0].sum() * result.grid.cell
    whole = values.sum() * result.grid.cell
    for share, at, where in ((whole - mass, (-0.2, 2.3), "left"), (mass, (0.2, -2.3), "right")):
        ax.annotate(f"mass {share:.3f}", at, ha=where, va="center")


def shades() -> Any:
    """From white to dark blue."""
    colours = require("matplotlib.colors", "cli")
    return colours.LinearSegmentedColormap.from_list("depth", ["#ffffff", "#56B4E9", "#08306b"])


def regions(result: Result) -> list[float]:
    """Densities at the borders of the truth's smallest regions of probability .99, .9 and .5."""
    ordered = np.sort(np.exp(result.truth.log_density))[::-1]
    inside = np.cumsum(ordered) * result.grid.cell
    return [float(ordered[np.searchsorted(inside, share)]) for share in (0.99, 0.9, 0.5)]


def curves(ax: Any, result: Result, key: str) -> None:
    """One measure against data visited, a line a series: mean and range over seeds."""
    for name, style in STYLES.items():
        found = series(result, name)
        if not found:
            continue
        x = [mean(rows, "visited") for rows in found.values()]
        y = np.array([mean(rows, key) for rows in found.values()])
        look = {"linewidth": 1.5, "markersize": 5.5, **style}
        ax.plot(x, y, label=NAMES[name], **look)
        if result.settings.seeds > 1 and name not in (FLOOR, FLOOR_REPLACE):
            low = [min(row[key] for row in rows) for rows in found.values()]
            high = [max(row[key] for row in rows) for rows in found.values()]
            ax.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    ax.set(yscale="log", xlabel="data visited", xlim=(0, None))
    ax.grid(True, which="major", color="#dddddd", linewidth=0.7)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
