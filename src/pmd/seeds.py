"""Seeds at the front door: an integer in, a JAX key out."""

from operator import index
from typing import Any

import jax
from jax import Array

from pmd.errors import InputError, InputTypeError


def check_seed(seed: Any) -> int:
    """The seed as a Python integer, or an error that says what `seed=` takes."""
    if isinstance(seed, jax.Array) or getattr(seed, "ndim", 0):
        raise InputTypeError(f"seed= takes an integer such as 0, not a key or an array: {seed!r}")
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise InputTypeError(f"seed= takes an integer such as 0, not {seed!r}")
    number = index(seed)
    if not 0 <= number < 2**32:
        raise InputError(f"seed= takes an integer from 0 to 2**32 - 1, not {number}")
    return number


def seed_to_key(seed: Any) -> Array:
    """The JAX key of an integer seed."""
    return jax.random.key(check_seed(seed))
