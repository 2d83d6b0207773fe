"""What every experiment leaves behind: a folder of rows, settings and versions."""

import csv
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from pmd.errors import InputError


def folder(path: Path) -> Path:
    """A folder to write to, made if need be; said in one line where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(f"--out {path} cannot be written: {reason}; name another") from error
    return path


def surroundings() -> dict[str, Any]:
    """What it takes to run it again: command, versions, platform."""
    names = ("particle-mirror-descent", "jax", "jaxlib", "numpy", "scipy")
    return {
        "command": ["pmd", *sys.argv[1:]],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in names},
        "platform": platform.platform(),
    }


def as_json(value: Any) -> str:
    """A JSON document; numbers that are not finite are not allowed."""
    return json.dumps(value, indent=1, allow_nan=False, default=float)


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Rows as CSV, with every column that any of them has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
