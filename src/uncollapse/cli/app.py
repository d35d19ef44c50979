"""The application: all commands of the command line."""

from typing import Annotated

import typer

from uncollapse import __version__, distributed
from uncollapse.cli.compare import compare
from uncollapse.cli.console import CommandGroup
from uncollapse.cli.demo import demo
from uncollapse.cli.diagnose import diagnose
from uncollapse.cli.doctor import doctor
from uncollapse.cli.embeddings import embeddings
from uncollapse.cli.list import list_names
from uncollapse.cli.options import Command, flag
from uncollapse.cli.sweep import sweep
from uncollapse.cli.table import table
from uncollapse.cli.train import train
from uncollapse.cli.tune import tune
from uncollapse.errors import UsageError

SHARED = ("train", "diagnose", "embeddings")  # commands that several processes can run together

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"uncollapse {__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    print_version: Annotated[
        bool, flag("--version", "Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, flag("--debug", "Show the traceback of an error.")] = False,
) -> None:
    """Measure and mend representation collapse in deep networks."""
    if distributed.launch_size() > 1:
        distributed.connect()
        if ctx.invoked_subcommand not in SHARED:
            raise UsageError(
                f"uncollapse {ctx.invoked_subcommand} runs in one process; start it without a launcher. "
                f"Commands that run in several: {', '.join(SHARED)}."
            )


app.command(cls=Command)(diagnose)
app.command(cls=Command)(compare)
app.command(cls=Command)(embeddings)
app.command("list", cls=Command)(list_names)
app.command(cls=Command)(demo)
app.add_typer(train, name="train")
app.command(cls=Command)(sweep)
app.add_typer(tune, name="tune")
app.command(cls=Command)(table)
app.command(cls=Command)(doctor)
