"""What the command says when something goes wrong: one sentence and an exit code.

0: done. 1: something unexpected. 2: another command line would do. 3: collapsed, with --fail-on-collapse. 130: Ctrl-C.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import uncollapse
from uncollapse.loading.errors import UsageError

HOME = str(Path(uncollapse.__file__).parent)


class Commands(TyperGroup):
    """The commands; an error in one of them is told in one sentence, unless --debug asks for the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; --debug may stand anywhere."""
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            with warnings.catch_warnings():
                if not ctx.params["debug"]:
                    warnings.showwarning = _note
                return super().invoke(ctx)
        except (typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            if ctx.params["debug"] or hasattr(error, "exit_code"):  # usage errors and exits say what they mean
                raise
            usage = isinstance(error, UsageError)
            typer.echo(f"Error: {sentence(error)}{'' if usage else ' (--debug shows where.)'}", err=True)
            raise typer.Exit(2 if usage else 1) from None


def sentence(error: BaseException) -> str:
    """What an error says, on one line."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split()) or type(error).__name__


def _note(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Warnings of ours and of the user's own files in one line; those of other libraries are for their programmers."""
    if filename.startswith(HOME) or "site-packages" not in filename:
        print(f"Note: {' '.join(str(message).split())}", file=sys.stderr)
