"""The command `pmd` (extra `cli`)."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pmd.errors import InputError, PmdError, require

if TYPE_CHECKING:
    from pmd.experiments.mixture import Settings


def main() -> None:
    """Run the command; what goes wrong is one line and exit code 2."""
    try:
        application()()
    except PmdError as error:
        print(f"pmd: {error}", file=sys.stderr)
        sys.exit(2)


def application() -> Any:
    """The command and its subcommands; made when called, since typer is an extra."""
    typer = require("typer", "cli")
    plain = {"no_args_is_help": True, "add_completion": False}
    app = typer.Typer(pretty_exceptions_enable=False, **plain)
    reproduce = typer.Typer(help="Reproduce an experiment of the paper.", **plain)
    app.add_typer(reproduce, name="reproduce")

    def show_version(wanted: bool) -> None:
        if wanted:
            import pmd

            print(f"pmd {pmd.__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Show the version and exit."
            ),
        ] = False,
    ) -> None:
        """Bayesian posteriors from minibatches, without gradients, with every mode."""

    add_mixture(reproduce, typer)
    return app


def add_mixture(group: Any, typer: Any) -> None:
    """`pmd reproduce mixture`."""

    @group.command()
    def mixture(
        data_seed: Annotated[int, typer.Option(help="Seed of the 1000 rows.")] = 1,
        seeds: Annotated[int, typer.Option(help="Runs of each kind; averages are shown.")] = 1,
        strategy: Annotated[
            str, typer.Option(metavar="NAME", help="all, default, never, every-step or switch.")
        ] = "all",
        passes: Annotated[float, typer.Option(help="Passes of the longest runs.")] = 5.0,
        out: Annotated[Path, typer.Option(help="Folder for picture and rows.")] = Path("mixture"),
        json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
    ) -> None:
        """The two-mode posterior against a grid: total variation and cross entropy.

        Runs the default and the paper's strategies, at its batch of 10.
        """
        from pmd.experiments.mixture import Settings

        settings = Settings(data_seed, seeds, chosen(strategy), passes)
        reproduce_mixture(settings, out, json)


def chosen(name: str) -> Any:
    """The strategies of a name on the command line."""
    from pmd.experiments.mixture import Strategy

    if name == "all":
        return tuple(Strategy)
    if name not in set(Strategy):
        names = ", ".join(["all", *Strategy])
        raise InputError(f"--strategy {name} is not one of {names}")
    return (Strategy(name),)


def reproduce_mixture(settings: "Settings", out: Path, as_json: bool) -> None:
    """Run, write, show; progress goes to standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from pmd.experiments import files, mixture, mixture_report

    require("matplotlib", "cli")
    files.folder(out)
    columns = (TextColumn("{task.description:<36}"), BarColumn(28), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("true posterior", total=settings.total)

        def tell(strategy: mixture.Strategy, passes: float, done: float) -> None:
            name = f"{mixture_report.NAMES[strategy]}, {passes:g} passes"
            bar.update(task, description=name, completed=done)

        result = mixture.run(settings, tell)
        bar.update(task, description="picture")
        written = mixture_report.write(result, out)
    if as_json:
        print(mixture_report.document(result))
        return
    console = Console()
    console.print(mixture_report.table(result))
    console.print(mixture_report.LEGEND, style="dim")
    console.print(
        f"\nAll in {result.seconds:.0f} s. In {out}: {', '.join(f.name for f in written)}"
    )
