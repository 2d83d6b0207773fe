"""The progress bar: pass, batch, ESS, step size, moves, error of the last fit, time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pmd.plan import Plan

if TYPE_CHECKING:
    from pmd.run import Run


@contextmanager
def bar(plan: Plan) -> Iterator[Callable[["Run", dict[str, Any]], None] | None]:
    """A bar over the rows of planned steps; None where rich is not installed."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield None
        return
    total = plan.budget + plan.full_passes * plan.num_data
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("pmd", total=total, told="")
        told = {"moves": 0, "error": float("nan")}

        def show(run: "Run", record: dict[str, Any]) -> None:
            if record["kind"] == "move":
                told["moves"] += 1
                told["error"] = record["error"]
                return
            line = (
                f"pass {record['pass']:.2f} B {record['rows']} "
                f"ESS {record['ess'] / max(record['particles'], 1):.2f}m "
                f"g {record['step_size']:.3f} moves {told['moves']} fit {told['error']:.2g}"
            )
            progress.update(task, completed=min(record["visited"], total), told=line)

        yield show
