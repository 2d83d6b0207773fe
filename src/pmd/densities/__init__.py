"""Where particles move to: three members of one family, fitted to particles and drawn from.

`regression` (the default), `gaussian` and `kernel`, the last with a rule for its bandwidth:
`scott`, `local`, and the paper's `isotropic`, `theory` and `median`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pmd.densities.blocked import epanechnikov, gaussian_kernel
from pmd.densities.gaussian import GaussianMixture, gaussian
from pmd.densities.kernel import (
    KernelMixture,
    isotropic,
    kernel,
    local,
    median,
    scott,
    theory,
)
from pmd.densities.regression import regression
from pmd.densities.surrogate import Regressed
from pmd.errors import InputError

__all__ = [
    "epanechnikov",
    "gaussian",
    "gaussian_kernel",
    "isotropic",
    "kernel",
    "local",
    "median",
    "regression",
    "scott",
    "theory",
    "unpack",
]


def unpack(parts: Mapping[str, np.ndarray]) -> Any:
    """The fitted density whose `pack()` this is."""
    rule = str(parts["rule"])
    match rule:
        case "kernel":
            return KernelMixture.unpack(parts)
        case "gaussian":
            return GaussianMixture.unpack(parts)
        case "regression":
            return Regressed.unpack(parts)
    raise InputError(f"a density of kind {rule!r} is not known here: was it saved by a later pmd?")
