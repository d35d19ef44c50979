"""Terminal output, output folders and devices that several commands share."""

import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from uncollapse import distributed
from uncollapse.cli import options
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io.files import ADVICE, NotWrittenError, expand_user

if TYPE_CHECKING:
    import torch

    from uncollapse.diagnosis.result import Diagnosis

COLLAPSED = 3
LONGEST_NAME = 100  # letters of a name that names a folder: file systems have a largest length
WIDE = 160  # columns where the output is no terminal and has no width of its own


def stdout_console() -> Console:
    """Return a console for stdout."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDE)


def print_note(words: str) -> None:
    """Print a sentence on stderr, apart from the result; it is wrapped between words on a terminal."""
    said = escape_controls(words)
    typer.echo(wrap_lines(said) if sys.stderr.isatty() else said, err=True)


def print_words(words: str) -> None:
    """Print a sentence on stdout; it is wrapped between words on a terminal."""
    typer.echo(wrap_lines(words) if sys.stdout.isatty() else words)


def print_written(paths: Iterable[Path | str], *, err: bool = False) -> None:
    """Print the files that were written, one per line."""
    for path in paths:
        typer.echo(f"Written: {path}", err=err)


def wrap_lines(words: str) -> str:
    """Break lines between words at the width of the terminal; no word is broken, so paths can be copied."""
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in words.split("\n")
    )


def output_folder(out: Path | None, name: str, as_json: bool) -> Path | None:
    """Return the folder for files: the given one, or one here that is named after the model; JSON alone needs none.

    Raises a UsageError, before anything is measured, if the folder cannot be written to.
    """
    if as_json and out is None:
        return None
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[-LONGEST_NAME:].strip("-.")
    place = out or Path(f"uncollapse-{plain or 'model'}")
    check_writable(place)
    return place


def check_writable(place: Path) -> None:
    """Raise a UsageError if a folder cannot be written to."""
    if place.exists() and not place.is_dir():
        raise UsageError(f"{place} is a file; --out takes a folder.")
    there = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK):
        raise UsageError(f"{there} is not writable; name another folder with --out.")


def deliver(diagnosis: "Diagnosis", *, place: Path | None, as_json: bool, fail: bool) -> None:
    """Write a diagnosis into a folder, print it, and exit with its code. place: None writes nothing."""
    try:
        written = [] if place is None else _write_files(diagnosis, place)  # first: a pipe may close early
    except NotWrittenError:
        _print(diagnosis, as_json)  # so that the measurement is not lost
        raise
    _print(diagnosis, as_json)
    print_written(written, err=as_json)
    raise typer.Exit(exit_code(diagnosis, fail))


def exit_code(diagnosis: "Diagnosis", fail: bool) -> int:
    """Return the exit code. fail: a collapse of any part exits with 3."""
    return COLLAPSED if fail and any(each.verdict.collapsed for each in (diagnosis, *diagnosis.others)) else 0


def _print(diagnosis: "Diagnosis", as_json: bool) -> None:
    if as_json:
        typer.echo(diagnosis.to_json())
    else:
        print_diagnosis(diagnosis)


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    """Print the tables, the verdict with its causes and cautions, and what to try."""
    verdict, terminal = diagnosis.verdict, stdout_console()
    for table in diagnosis.tables(terminal.width):
        terminal.print(table)
    for note in () if diagnosis.parts is None else diagnosis.parts.notes():
        print_paragraph(terminal, note)
    print_paragraph(terminal, verdict.sentence, style="bold red" if verdict.collapsed else "bold green")
    print_paragraph(terminal, verdict.sure, bullet=" · ")
    for cause in verdict.causes:
        print_paragraph(terminal, verdict.describe_cause(cause), style="bold")
        for evidence in cause.evidence:
            print_paragraph(terminal, evidence, bullet=" · ")
    for caution in verdict.cautions:
        print_paragraph(terminal, caution, bullet=" · ")
    if verdict.outlook:
        print_paragraph(terminal, verdict.outlook, bullet=" · ")
    for advice in verdict.advice:
        print_paragraph(terminal, advice.sentence, bullet=" → ")
        print_paragraph(terminal, advice.code, bullet="   ", style="cyan")
    for part in diagnosis.others:
        terminal.print()
        print_diagnosis(part)


def print_paragraph(terminal: Console, words: str, *, bullet: str = "", style: str = "") -> None:
    """Print a sentence, wrapped with an indent on a terminal and on one line elsewhere."""
    if not terminal.is_terminal:
        terminal.print(Text(bullet + words), soft_wrap=True)
        return
    grid = Table.grid()
    grid.add_row(*([bullet] if bullet else []), Text(words, style=style))
    terminal.print(grid)


def _write_files(diagnosis: "Diagnosis", place: Path) -> list[Path]:
    """Write the files, and return their paths."""
    files = [diagnosis.save(place / "diagnosis.json")]
    try:
        files.append(diagnosis.report(place / "report.html"))
    except ImportError as error:
        print_note(f"No report was written: {error}")
    return files


def escape_controls(value: Any) -> Any:
    """Return text with its control characters written out, also inside lists and objects from JSON.

    >>> escape_controls("a\\x1b[2Jb"), escape_controls(["é\\n"])
    ('a\\\\x1b[2Jb', ['é\\n'])
    """
    if isinstance(value, str):
        return "".join(letter if _is_harmless(letter) else ascii(letter)[1:-1] for letter in value)
    if isinstance(value, list):
        return [escape_controls(item) for item in value]
    if isinstance(value, dict):
        return {escape_controls(key): escape_controls(item) for key, item in value.items()}
    return value


def _is_harmless(letter: str) -> bool:
    return letter in "\n\t\u00a0\u202f" or letter.isprintable()


def select_device(name: str) -> "torch.device":
    """Return the device of this name; "auto" is a GPU if there is one."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, present in there.items() if present))
    usable = ", ".join(kind for kind, present in there.items() if present)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        hint = did_you_mean(name, ("auto", *there))
        raise UsageError(f"There is no device {name!r}; choose auto or one of {usable}.{hint}") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if not there.get(device.type) or (device.index or 0) >= count:
        raise UsageError(f"The device {name} is not available; choose auto or one of {usable}.")
    return device


def check_folders(results: Path, runs: Path, data_root: Path | None) -> None:
    """Raise if a folder is a file, and print a note if the folder of the datasets does not exist."""
    named = {"--results": results, "--runs": runs, "--data-root": data_root}
    for flag, folder in named.items():
        places = () if folder is None else (folder, *folder.parents)
        for place in places:
            if os.path.exists(place) and not os.path.isdir(place):
                raise UsageError(f"{place} is a file; {flag} names a folder.")
    if data_root is not None and not os.path.isdir(expand_user(data_root)):
        purpose = "Datasets are read from there, or downloaded to it."
        print_note(f"The folder {data_root} of --data-root does not exist. {purpose}")


def make_folders(results: Path, runs: Path) -> None:
    """Make the folders that are written to, or raise before a run that takes hours."""
    from uncollapse.lab.runs.run_one import check_writable

    check_writable(results)
    check_writable(runs, "Checkpoints")


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

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters."""
        return options.without_flag_types(super().get_params(ctx))

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
                print_note(said)
            raise typer.Exit(130) from None
        except Exception as error:
            code = getattr(error, "exit_code", None)
            if code is not None and not distributed.is_first_to_report(str(error)):
                raise typer.Exit(code) from None
            if code is not None and hasattr(error, "message"):  # of others, it may be read-only
                error.message = str(error.message).replace("Value error, ", "")  # before a wrong name, by typer
            if ctx.params["debug"] or code is not None:  # usage errors and exits print themselves
                raise
            known = isinstance(error, OSError) and error.errno in ADVICE
            usage = known or isinstance(error, UsageError | NotWrittenError)
            words = f"Error: {error_sentence(error)}{'' if usage else ' (--debug shows the traceback.)'}"
            if said := distributed.failure_message(error, words):
                print_note(said)
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
    reason = f"{error.strerror}." if file is None else f"{file}: {error.strerror}."
    return " ".join(filter(None, (reason, ADVICE.get(error.errno or 0))))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print warnings of this package and of the user's own files on one line, and hide those of other libraries."""
    words = " ".join(str(message).split())
    if (filename.startswith(PACKAGE_FOLDER) or "site-packages" not in filename) and distributed.is_first_to_report(
        words
    ):
        print_note(f"Note: {words}")
