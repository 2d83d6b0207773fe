"""The documentation runs: every Python block of README and docs, every example of a docstring."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import pmd

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)

# Other names of Python would be shown as code and never run.
LANGUAGES = {"python", "console", "text", "bibtex", "toml"}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_name_a_known_language(page: Path) -> None:
    languages = {match["language"].strip() for match in FENCE.finditer(page.read_text())}
    assert languages <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # pages may save files and pictures
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text, names = page.read_text(), {"__name__": "__main__"}
    for match in FENCE.finditer(text):
        if match["language"].strip() != "python":
            continue
        # Blank lines in front give tracebacks the line numbers of the page.
        above = "\n" * text.count("\n", 0, match.start("code"))
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.M)
        exec(compile(above + code, str(page), "exec"), names)


def modules() -> list[str]:
    return sorted(module.name for module in pkgutil.walk_packages(pmd.__path__, "pmd."))


@pytest.mark.parametrize("module", modules())
def test_docstring_examples_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    assert doctest.testmod(importlib.import_module(module)).failed == 0
