"""The mixture experiment's files and table: rows, settings, plain words, a picture."""

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from pmd.experiments.files import as_json, surroundings, write_rows
from pmd.experiments.mixture import (
    BATCH,
    FEW,
    FIRST,
    FLOOR,
    FLOOR_REPLACE,
    NUM_DATA,
    PARTICLES,
    SWITCH,
    WIDTH,
    Result,
    Strategy,
)

NAMES = {
    Strategy.DEFAULT: "pmd.fit, default",
    Strategy.NEVER: "strategy 1: never move",
    Strategy.EVERY_STEP: "strategy 2: always move",
    Strategy.SWITCH: "switch from 2 to 1",
    FLOOR: "grid, no particles: floor",
    FLOOR_REPLACE: "grid, with replacement",
}
"""What people call the series, in the order in which they are shown."""

COLUMNS = (
    ("TV", "total_variation", 4),
    ("KL", "kl", 4),
    ("mass off", "mode_mass_error", 4),
    ("rows", "visited", 0),
    ("evals", "evaluations", 0),
)
"""Heading, column of the rows, decimals (of numbers under ten)."""

LEGEND = (
    "TV: total variation to the true posterior. KL: of the truth from the estimate, in nats (the "
    "cross entropy less the truth's own entropy). Mass off: error of the mass of one mode. Rows: "
    "visited by steps. Evals: likelihood evaluations, particles times rows over N, with checks."
)


def series(result: Result, name: str) -> dict[float, list[dict[str, Any]]]:
    """Rows of one series by the length of their runs, shortest first; over all seeds."""
    found: dict[float, list[dict[str, Any]]] = {}
    for row in result.rows:
        if row["strategy"] == name:
            found.setdefault(row["passes"], []).append(row)
    return dict(sorted(found.items()))


def mean(rows: list[dict[str, Any]], key: str) -> float:
    """Mean of a column over seeds; NaN where it is not there."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return float(np.mean(values)) if values else float("nan")


def cells(result: Result) -> list[list[str]]:
    """The longest runs of each series as text: averages over seeds."""
    lines = []
    for name, title in NAMES.items():
        found = series(result, name)
        if found:
            rows = list(found.values())[-1]
            lines.append([title, *(text(mean(rows, key), n) for _, key, n in COLUMNS)])
    return lines


def text(value: float, decimals: int) -> str:
    """A number of a table; nothing where there is none."""
    if not np.isfinite(value):
        return ""
    return f"{value:.{min(decimals, 1) if abs(value) >= 10 else decimals}f}"


def headline(result: Result) -> str:
    """What the table shows, in a line."""
    seeds = result.settings.seeds
    over = f", mean of {seeds} seeds" if seeds > 1 else ""
    return f"The paper's mixture after {result.settings.passes:g} passes{over}"


def table(result: Result) -> Any:
    """The longest runs as a table for the screen, within 80 columns."""
    from rich import box
    from rich.table import Table

    shown = Table(title=headline(result), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    for heading, _, _ in COLUMNS:
        shown.add_column(heading, justify="right", no_wrap=True)
    for line in cells(result):
        shown.add_row(*line)
    return shown


def settings_of(result: Result) -> dict[str, Any]:
    """Settings, seeds and versions: what it takes to run it again."""
    chosen = result.settings
    return {
        "experiment": "mixture",
        **asdict(chosen),
        "strategies": [str(strategy) for strategy in chosen.strategies],
        "lengths": {str(s): chosen.lengths(s) for s in chosen.strategies},
        "run_seeds": list(range(chosen.seeds)),
        **surroundings(),
        "seconds": round(result.seconds, 2),
    }


def document(result: Result) -> str:
    """Settings, truth and all rows as one JSON document."""
    truth = {
        "log_evidence": result.truth.log_normaliser,
        "entropy": result.truth.entropy,
        "mode_mass": result.truth_mass,
    }
    return as_json({"settings": settings_of(result), "truth": truth, "rows": result.rows})


def write(result: Result, out: Path) -> list[Path]:
    """Write everything into a folder.

    Returns:
        the files: the picture, the words, the rows, the settings.
    """
    from pmd.experiments.mixture_figure import save

    names = ("mixture.png", "README.md", "rows.csv", "rows.json", "settings.json")
    picture, readme, rows, whole, settings = files = [out / name for name in names]
    write_rows(result.rows, rows)
    whole.write_text(document(result) + "\n")
    settings.write_text(json.dumps(settings_of(result), indent=1) + "\n")
    readme.write_text(words(result))
    save(result, picture)
    return files


def words(result: Result) -> str:
    """The folder's README."""
    settings, truth = result.settings, result.truth
    head = "| " + " | ".join(["", *(name for name, _, _ in COLUMNS)]) + " |"
    rule = "|---" + "|---:" * len(COLUMNS) + "|"
    body = "\n".join("| " + " | ".join(line) + " |" for line in cells(result))
    return f"""# The paper's mixture

{NUM_DATA} rows of x ~ N(a, 2.5²)/2 + N(a + b, 2.5²)/2, drawn at (a, b) = (1, -2) with data seed
{settings.data_seed}; standard normal priors on a and b. The posterior has two modes. On a grid of
{settings.points} x {settings.points} points:

- masses {result.truth_mass:.4f} (b < 0) and {1 - result.truth_mass:.4f},
- log-evidence {truth.log_normaliser:.3f},
- entropy {truth.entropy:.4f} nats.

![True posterior, estimate, total variation, cross entropy](mixture.png)

{headline(result)}:

{head}
{rule}
{body}

{fill(LEGEND, 98)}

What was run, each with {settings.num_particles} particles at the end:

- **pmd.fit, default**: `pmd.fit(problem, x, num_particles={settings.num_particles})`. Batches
  grow, particles move by regression, the last steps take all rows.
- **Strategy 1** of the paper: weighted particles that stay where the prior put them, batches of
  {BATCH}. They are atoms and have no density. TV and KL are those of a kernel estimate with .1
  times the median distance as bandwidth, as the paper scores samples: much of them is the kernel's.
  The mode's mass is that of the weighted particles.
- **Strategy 2** of the paper: drawn anew from a kernel estimate before every step, bandwidth
  h = {WIDTH:g} m^(-1/2), m growing from {FIRST / PARTICLES:.0%} of them. Each move adds
  h² to the variance and each step takes back only a small part of it: the estimate stays too
  wide, and a mode that is lost stays lost.
- **Switch**: strategy 2 with {FEW / PARTICLES:.0%} of the particles for {SWITCH} passes, then
  strategy 1 with all of them; scored like strategy 1.
- **Grid**: mirror descent without particles along the same batches of {BATCH} with the same step
  sizes. Particle methods that keep to these batches cannot be expected to do better; the default
  does not keep to them. Rows drawn with replacement, as in the paper, raise the floor: after 5
  passes from a TV of .04 to .22, mean of twenty runs.

Every point of a curve is a run of its own, of that length. `rows.csv` and `rows.json` hold them
all, `settings.json` the seeds and versions.
"""
