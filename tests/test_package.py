"""The package as it is installed: names, what an import costs, extras, the lock."""

import pkgutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import pmd

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def python(code: str) -> str:
    """What a fresh interpreter prints, given `code`."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", pmd.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(pmd, name) is not None
    assert name in dir(pmd)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        pmd.fitt  # noqa: B018


def test_no_module_hides_a_public_name() -> None:
    """A submodule, once imported, is an attribute of the package of the same name."""
    modules = {module.name for module in pkgutil.iter_modules(pmd.__path__)}
    assert modules & set(pmd.__all__) == {"data", "densities", "schedules"}


def test_version_is_the_installed_one() -> None:
    assert pmd.__version__ == metadata.version("particle-mirror-descent") == PROJECT["version"]


def test_the_package_is_typed() -> None:
    assert (ROOT / "src/pmd/py.typed").is_file()


@pytest.mark.parametrize(
    ("clock", "then", "seconds"),
    [("perf_counter", "", 0.3), ("process_time", "pmd.fit, pmd.Problem, pmd.load", 0.5)],
    ids=["import", "everything behind it"],
)
def test_import_costs_little_beyond_jax(clock: str, then: str, seconds: float) -> None:
    """The best of a few, since the machine has other work; what is loaded at need, in CPU time."""
    code = f"import time, jax; start = time.{clock}(); import pmd; {then}\n"
    code += f"print(time.{clock}() - start)"
    assert min(float(python(code)) for _ in range(4)) <= seconds


def test_import_leaves_slow_modules_alone() -> None:
    slow = ["scipy.stats", "matplotlib", "pandas", "numpyro", "typer", "rich"]
    code = (
        "import sys, jax; before = set(sys.modules); import pmd; pmd.fit, pmd.Posterior; "
        f"print([name for name in {slow} if name in sys.modules and name not in before])"
    )
    assert python(code).strip() == "[]"


def test_every_module_of_the_core_imports_without_extras() -> None:
    """Only jax, NumPy, SciPy and rich may be needed, except where an extra is asked for by use."""
    extras = ["matplotlib", "pandas", "numpyro", "typer", "arviz"]
    code = f"""
import importlib, pathlib, pkgutil, sys
for name in {extras}:
    sys.modules[name] = None
import pmd
for module in pkgutil.walk_packages(pmd.__path__, "pmd."):
    importlib.import_module(module.name)
"""
    python(code)


def test_all_holds_every_extra_a_user_may_ask_for() -> None:
    (everything,) = EXTRAS["all"]
    named = everything.partition("[")[2].rstrip("]").split(",")
    assert sorted(named) == sorted(set(EXTRAS) - {"all", "test", "docs", "dev"})


def test_the_lock_holds_exact_versions_of_what_is_asked_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin and "@" not in pin for pin in pins)
    locked = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    asked = [*PROJECT["dependencies"], *(need for needs in EXTRAS.values() for need in needs)]
    names = {need.split("[")[0].split(">")[0].split("<")[0] for need in asked}
    assert names - {"particle-mirror-descent"} <= locked
