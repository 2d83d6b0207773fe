"""A posterior as text: a table of its parameters, its modes, and how the run went."""

import math
import textwrap
from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    from pmd.posterior import Posterior

WIDTH = 79
ROWS = 20
LEVELS = (0.05, 0.5, 0.95)
MOST_COLUMNS = 4  # parameters whose place a mode's row has room for


def summary(posterior: "Posterior") -> str:
    """The text that `print(posterior)` shows."""
    parts = [table(posterior), modes(posterior), figures(posterior)]
    parts += [textwrap.fill(how, WIDTH) for how in (posterior.settings.get("plan", ""),) if how]
    parts.append(str(posterior.certificate))
    return "\n\n".join(part for part in parts if part)


def table(posterior: "Posterior") -> str:
    """Mean, sd and quantiles of the numbers of a parameter, of the first ones if there are many."""
    mean, _, sd, _ = posterior.cloud.moments()
    levels = posterior.cloud.quantiles(np.array(LEVELS))
    rows = [
        [name, *(number(value, sd[j]) for value in (mean[j], sd[j], *levels[:, j]))]
        for j, name in enumerate(posterior.names[:ROWS])
    ]
    text = aligned([["", "mean", "sd", *(f"{level:.0%}" for level in LEVELS)], *rows])
    more = len(posterior.names) - ROWS
    return text + (f"\n... and {more} more" if more > 0 else "")


def modes(posterior: "Posterior") -> str:
    """A row for every mode where there are several, else nothing."""
    found = posterior.modes()
    if len(found) < 2:
        return ""
    names = posterior.names
    shown = names if len(names) <= MOST_COLUMNS else names[:MOST_COLUMNS]
    rows = [["mode", "mass", *shown]]
    for k, mode in enumerate(found, 1):
        centre, sd = flat(mode.centre), flat(mode.sd)
        places = [f"{number(centre[j], sd[j])} ± {number(sd[j], sd[j])}" for j in range(len(shown))]
        rows.append([str(k), f"{mode.mass:.3f}", *places])
    cut = f"\n... centres of the first {len(shown)} of {len(names)} numbers"
    return aligned(rows) + (cut if len(shown) < len(names) else "")


def figures(posterior: "Posterior") -> str:
    """Effective sample size, noise, evidence, work done."""
    certificate = posterior.certificate
    source = {
        "particles": "the weighted particles",
        "density": "draws of the fitted density, corrected by the particles",
    }[posterior.using]
    return "\n".join(
        [
            f"effective particles  {posterior.ess:.0f} of {posterior.num_particles}",
            f"minibatch noise      {certificate.minibatch_noise:.2g} nats",
            f"log-evidence         {posterior.log_evidence:.3f}"
            f" ± {posterior.log_evidence_error:.2g}",
            f"evaluations          {posterior.evaluations:,.0f} (particles x rows / N)",
            f"estimates from       {source}",
        ]
    )


def flat(tree: object) -> np.ndarray:
    """The numbers of a pytree in one row."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def number(value: float, sd: float) -> str:
    """A number with as many digits as its sd calls for: three of the sd."""
    if not (math.isfinite(value) and math.isfinite(sd)) or sd <= 0:
        return f"{value:.4g}"
    digits = 2 - math.floor(math.log10(sd))
    if abs(value) >= 1e7 or digits > 8:
        return f"{value:.{max(3, digits + math.floor(math.log10(max(abs(value), sd))))}e}"
    return f"{value:.{max(digits, 0)}f}"


def aligned(rows: list[list[str]]) -> str:
    """Columns to the right, the first to the left, with a line below the head."""
    widths = [max(len(row[j]) for row in rows) for j in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    rule = "-" * max(len(line) for line in lines)
    return "\n".join(line.rstrip() for line in [lines[0], rule, *lines[1:]])
