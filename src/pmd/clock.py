"""Where the time of a run goes: likelihood, move, walk, and compiling."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_compiled = 0.0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _compiled
    if event.endswith(("jaxpr_to_mlir_module_duration", "backend_compile_duration")):
        _compiled += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


class Clock:
    """Seconds by what they were spent on; compiling counts apart, and the innermost use counts."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds = {"likelihood": 0.0, "move": 0.0, "walk": 0.0, "compile": 0.0}
        self._inner: list[tuple[float, float]] = []

    @contextmanager
    def __call__(self, use: str) -> Iterator[None]:
        """Count the time of a block as `use`."""
        began, compiled = time.perf_counter(), _compiled
        self._inner.append((0.0, 0.0))
        try:
            yield
        finally:
            inside, inside_compiling = self._inner.pop()
            elapsed, compiling = time.perf_counter() - began, _compiled - compiled
            self.seconds["compile"] += compiling - inside_compiling
            self.seconds[use] += max(elapsed - inside - (compiling - inside_compiling), 0.0)
            if self._inner:
                outer, outer_compiling = self._inner[-1]
                self._inner[-1] = outer + elapsed, outer_compiling + compiling

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def shares(self) -> dict[str, float]:
        """Seconds by use, and in all."""
        told = {**self.seconds, "all": self.elapsed}
        return {use: round(seconds, 3) for use, seconds in told.items()}
