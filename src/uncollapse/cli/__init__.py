"""The command line: parse, call, print."""

from typing import Annotated

import typer

from uncollapse import __version__, launching
from uncollapse.cli.comparing import compare
from uncollapse.cli.diagnosing import diagnose
from uncollapse.cli.doctor import doctor
from uncollapse.cli.embedded import embeddings
from uncollapse.cli.errors import Commands
from uncollapse.cli.lists import list_names
from uncollapse.cli.options import flag
from uncollapse.cli.showing import demo
from uncollapse.cli.sweeping import sweep
from uncollapse.cli.tabling import table
from uncollapse.cli.training import train
from uncollapse.cli.tuning import tune
from uncollapse.loading.errors import UsageError

SHARED = ("train", "diagnose", "embeddings")  # what several processes can do together

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"uncollapse {__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    print_version: Annotated[
        bool, flag("--version", "Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, flag("--debug", "Show the traceback of an error.")] = False,
) -> None:
    """Measure and mend the collapse of representations in deep networks."""
    if launching.launched() > 1:
        launching.meet()
        if ctx.invoked_subcommand not in SHARED:
            raise UsageError(
                f"uncollapse {ctx.invoked_subcommand} is one process; start it without a launcher. "
                f"Several can share {', '.join(SHARED)}."
            )


app.command()(diagnose)
app.command()(compare)
app.command()(embeddings)
app.command("list")(list_names)
app.command()(demo)
app.add_typer(train, name="train")
app.command()(sweep)
app.add_typer(tune, name="tune")
app.command()(table)
app.command()(doctor)
