"""Particle mirror descent: posteriors from minibatches, without gradients, with every mode."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmd import data, densities, schedules
    from pmd.algorithm import mirror_descent
    from pmd.certificate import Certificate
    from pmd.errors import PmdError
    from pmd.fitting import fit
    from pmd.posterior import Posterior
    from pmd.problem import Problem
    from pmd.rejuvenate import every_step, never, switch, when_degenerate
    from pmd.storage import load

    __version__: str

__all__ = [
    "Certificate",
    "PmdError",
    "Posterior",
    "Problem",
    "__version__",
    "data",
    "densities",
    "every_step",
    "fit",
    "load",
    "mirror_descent",
    "never",
    "schedules",
    "switch",
    "when_degenerate",
]

# Where each name lives: a room is loaded when it is first asked for, so that the import is quick.
_HOMES = {
    "Certificate": "certificate",
    "PmdError": "errors",
    "Posterior": "posterior",
    "Problem": "problem",
    "every_step": "rejuvenate",
    "fit": "fitting",
    "load": "storage",
    "mirror_descent": "algorithm",
    "never": "rejuvenate",
    "switch": "rejuvenate",
    "when_degenerate": "rejuvenate",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("particle-mirror-descent")
    if name in {"data", "densities", "schedules"}:
        return importlib.import_module(f"pmd.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'pmd' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pmd.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
