"""What all tests share.  (Being here also puts this folder on the path: `targets`, `known`.)"""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

# Compiling takes most of the time, and how long is no property of the code under test.
settings.register_profile(
    "pmd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pmd")


@pytest.fixture(params=[False, True], ids=["float32", "float64"])
def precision(request: pytest.FixtureRequest) -> Iterator[float]:
    """Run a test in both precisions of JAX; the value is the rounding unit."""
    with jax.enable_x64(request.param):
        yield 2.2e-16 if request.param else 1.2e-7


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Forget compiled programs before they use up a process's memory maps.

    Each takes some twenty, Linux allows 65,530, and a process that has none left crashes in the
    compiler.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
