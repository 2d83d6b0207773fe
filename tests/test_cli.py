"""The command `pmd`: what it prints, what it leaves, how it fails."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pmd

TINY = ["reproduce", "mixture", "--strategy", "never", "--passes", "0.2"]


def command(
    *arguments: str, without: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `pmd` in a process of its own, in an 80-column terminal."""
    hide = f"sys.modules[{without!r}] = None; " if without else ""
    code = f"import sys; {hide}from pmd.cli import main; sys.argv[0] = 'pmd'; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=False, cwd=cwd,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A tiny run: what it printed and where it wrote."""
    out = tmp_path_factory.mktemp("cli") / "deep" / "demo"
    ran = command(*TINY, "--seeds", "2", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, out


def test_version() -> None:
    assert command("--version").stdout == f"pmd {pmd.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["reproduce"], ["reproduce", "--help"]])
def test_help_leads_to_the_experiments(arguments: list[str]) -> None:
    told = command(*arguments)
    assert "Usage: pmd" in told.stdout + told.stderr
    assert ("mixture" if arguments[:1] == ["reproduce"] else "reproduce") in told.stdout


def test_help_names_every_option() -> None:
    told = command("reproduce", "mixture", "--help").stdout
    for option in ("--data-seed", "--seeds", "--strategy", "--passes", "--out", "--json"):
        assert option in told


def test_the_table_fits_the_screen(done: tuple[str, Path]) -> None:
    printed, _ = done
    assert "strategy 1: never move" in printed
    assert "mean of 2 seeds" in printed
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80


def test_all_files_are_written(done: tuple[str, Path]) -> None:
    _, out = done
    names = {"mixture.png", "README.md", "rows.csv", "rows.json", "settings.json"}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "mixture.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "mixture.png").stat().st_size < 300_000
    assert "(mixture.png)" in (out / "README.md").read_text()
    settings = json.loads((out / "settings.json").read_text())
    assert settings["strategies"] == ["never"]
    assert settings["run_seeds"] == [0, 1]
    assert settings["versions"]["particle-mirror-descent"] == pmd.__version__


def test_rows_are_the_same_in_both_formats(done: tuple[str, Path]) -> None:
    _, out = done
    rows = json.loads((out / "rows.json").read_text())["rows"]
    with (out / "rows.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(rows) == len(table)
    for row, line in zip(rows, table, strict=True):
        assert row["strategy"] == line["strategy"]
        assert row["total_variation"] == float(line["total_variation"])


def test_json_goes_to_the_screen_alone(tmp_path: Path) -> None:
    ran = command(*TINY, "--json", cwd=tmp_path)
    found = json.loads(ran.stdout)
    assert {row["strategy"] for row in found["rows"]} == {"never", "grid", "grid-replace"}
    assert found["truth"]["mode_mass"] == pytest.approx(0.4638, abs=1e-3)
    assert (tmp_path / "mixture" / "rows.json").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategy", "sometimes"], "all, default, never, every-step, switch"),
        (["--out", "/dev/null/demo"], "--out /dev/null/demo cannot be written"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--passes", "-1"], "passes must lie between"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], told: str, tmp_path: Path) -> None:
    ran = command("reproduce", "mixture", *arguments, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1
    assert told in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["typer", "matplotlib"])
def test_a_missing_extra_is_one_line(module: str, tmp_path: Path) -> None:
    ran = command(*TINY, without=module, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [
        f"pmd: {module} is needed here: pip install 'particle-mirror-descent[cli]'"
    ]
    assert list(tmp_path.iterdir()) == []
