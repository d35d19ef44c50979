"""The command line: parse, call, print."""

from typing import Annotated

import typer

from uncollapse import __version__
from uncollapse.cli.comparing import compare
from uncollapse.cli.diagnosing import diagnose
from uncollapse.cli.embedded import embeddings
from uncollapse.cli.errors import Commands
from uncollapse.cli.lists import list_names
from uncollapse.cli.options import flag
from uncollapse.cli.showing import demo
from uncollapse.cli.sweeping import sweep
from uncollapse.cli.tabling import table
from uncollapse.cli.training import train

app = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"uncollapse {__version__}")
        raise typer.Exit


@app.callback()
def options(
    print_version: Annotated[
        bool, flag("--version", "Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, flag("--debug", "Show the traceback of an error.")] = False,
) -> None:
    """Measure and mend the collapse of representations in deep networks."""


app.command()(diagnose)
app.command()(compare)
app.command()(embeddings)
app.command("list")(list_names)
app.command()(demo)
app.add_typer(train, name="train")
app.command()(sweep)
app.command()(table)
