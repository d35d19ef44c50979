"""The command line: parse, call, print."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

from uncollapse import __version__
from uncollapse import demo as demonstration
from uncollapse.registry import CURES, LOSSES, METRICS

Columns = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]


class Commands(TyperGroup):
    """The commands; an error in one of them is told in one sentence, unless --debug asks for the traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params["debug"] or hasattr(
                error, "exit_code"
            ):  # usage errors and exits say what they mean themselves
                raise
            typer.echo(f"Error: {_sentence(error)}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _sentence(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split()) or type(error).__name__


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"uncollapse {__version__}")
        raise typer.Exit


@app.callback()
def options(
    print_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure and mend the collapse of representations in deep networks."""


@app.command("list")
def list_names(kind: Annotated[str, typer.Argument(help="metrics, cures or losses", metavar="KIND")]) -> None:
    """List the metrics, cures or losses with their facts."""
    kinds = {"metrics": _metrics, "cures": _cures, "losses": _losses}
    if kind not in kinds:
        typer.echo(f"There is no list of {kind!r}; choose one of {', '.join(kinds)}.", err=True)
        raise typer.Exit(2)
    names, rows = kinds[kind]()
    table = Table(Column(names[0], no_wrap=True), *names[1:])
    for row in rows:
        table.add_row(*row)
    console = Console() if sys.stdout.isatty() else Console(width=160)  # a pipe has no width of its own
    console.print(table)


def _metrics() -> Columns:
    rows = [(m.name, ", ".join(m.needs), m.better or "neither", m.paper) for m in METRICS.values()]
    return ("metric", "needs", "further from collapse", "paper"), rows


def _cures() -> Columns:
    return ("cure", "layer", "acts on", "paper"), [
        (c.name, c.layer.__name__, c.acts_on, c.paper) for c in CURES.values()
    ]


def _losses() -> Columns:
    return ("loss", "needs", "paper"), [(loss.name, ", ".join(loss.needs), loss.paper) for loss in LOSSES.values()]


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there too.")
    ] = None,
) -> None:
    """Show the rank of a deep random Transformer, block by block, with and without ContraNorm."""
    raise typer.Exit(demonstration.main(json_file))
