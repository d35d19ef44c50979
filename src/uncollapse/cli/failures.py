"""Errors of a command: one sentence and an exit code.

0: done. 1: unexpected error. 2: usage error. 3: collapsed, with --fail-on-collapse. 130: Ctrl-C.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from uncollapse import distributed
from uncollapse.cli import options
from uncollapse.cli.console import escape_controls
from uncollapse.errors import UsageError
from uncollapse.io.files import ADVICE, NotWrittenError

LONGEST = 2000  # letters of a sentence: a name in a file may have any number
PACKAGE_FOLDER = str(Path(__file__).parents[1])


class CommandGroup(TyperGroup):
    """The commands. An error is printed as one sentence, unless --debug asks for the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; --debug may come anywhere."""
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        options.handle_completion_flags(ctx, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        for stream in (sys.stdout, sys.stderr):  # file names may contain invalid text, and terminals may be old
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            with warnings.catch_warnings():
                if not ctx.params["debug"]:
                    warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except (typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt as interrupt:
            if said := distributed.failure_message(interrupt, "Interrupted."):
                typer.echo(said, err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            code = getattr(error, "exit_code", None)
            if code is not None and not distributed.is_first_to_report(str(error)):
                raise typer.Exit(code) from None
            if ctx.params["debug"] or code is not None:  # usage errors and exits print themselves
                raise
            known = isinstance(error, OSError) and error.errno in ADVICE
            usage = known or isinstance(error, UsageError | NotWrittenError)
            words = f"Error: {error_sentence(error)}{'' if usage else ' (--debug shows the traceback.)'}"
            if said := distributed.failure_message(error, words):
                typer.echo(said, err=True)
            raise typer.Exit(2 if usage else 1) from None
        finally:
            distributed.leave_group()


def error_sentence(error: BaseException) -> str:
    """Return the message of an error, on one line."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    if isinstance(error, OSError) and error.strerror and not isinstance(error, NotWrittenError):
        text = _system_error(error)
    words = escape_controls(" ".join(str(text).split())) or type(error).__name__
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"


def _system_error(error: OSError) -> str:
    """Return the file, if the system names one, the reason, and what to do, if that is known."""
    file = error.filename2 or error.filename
    told = f"{error.strerror}." if file is None else f"{file}: {error.strerror}."
    return " ".join(filter(None, (told, ADVICE.get(error.errno or 0))))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print warnings of this package and of the user's own files on one line, and hide those of other libraries."""
    words = " ".join(str(message).split())
    if (filename.startswith(PACKAGE_FOLDER) or "site-packages" not in filename) and distributed.is_first_to_report(
        words
    ):
        print(f"Note: {words}", file=sys.stderr)
