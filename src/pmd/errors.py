"""Errors of pmd: one base class, and a message that names the argument, the value and the cure."""

import importlib
from types import ModuleType
from typing import Any


class PmdError(Exception):
    """Base of every error that pmd raises on purpose."""


class InputError(PmdError, ValueError):
    """A value that cannot be used."""


class InputTypeError(PmdError, TypeError):
    """An argument of the wrong kind."""


class NotFiniteError(PmdError, ArithmeticError):
    """A log-density became NaN in the middle of a run; `posterior` is the last good state."""

    posterior: Any = None


class MissingExtra(PmdError, ImportError):
    """An optional dependency is not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or say in one line which extra of pmd brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        message = f"{name} is needed here: pip install 'particle-mirror-descent[{extra}]'"
        raise MissingExtra(message) from error
