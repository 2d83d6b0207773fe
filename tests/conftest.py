"""What all tests share.  (Being here also puts this folder on the path: `targets`, `known`.)"""

from collections.abc import Iterator

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
