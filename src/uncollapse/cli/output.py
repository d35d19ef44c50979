"""What a measurement leaves behind: a table and a verdict on the terminal, files, an exit code."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uncollapse.cli.printing import printable
from uncollapse.errors import UsageError
from uncollapse.io.files import NotWrittenError

if TYPE_CHECKING:
    from uncollapse.diagnosis.result import Diagnosis

COLLAPSED = 3
LONGEST = 100  # letters of a name that names a folder: file systems have a largest length
WIDE = 160  # columns where the output is no terminal and has no width of its own


def console() -> Console:
    """For stdout."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDE)


def note(words: str) -> None:
    """A line beside the result, on stderr."""
    typer.echo(printable(words), err=True)


def folder(out: Path | None, name: str) -> Path:
    """Where files go: what was asked for, or a folder here that is named after the model."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[-LONGEST:].strip("-.")
    return out or Path(f"uncollapse-{plain or 'model'}")


def check_writable(place: Path) -> None:
    """Raise now what would only be found out after the measurement."""
    if place.exists() and not place.is_dir():
        raise UsageError(f"{place} is a file; --out takes a folder.")
    there = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK):
        raise UsageError(f"{there} is not writable; name another folder with --out.")


def deliver(diagnosis: "Diagnosis", *, out: Path | None, as_json: bool, fail: bool) -> None:
    """Write and print a diagnosis, and leave with its exit code."""
    wanted = out is not None or not as_json
    try:
        written = _written(diagnosis, folder(out, diagnosis.model)) if wanted else ""  # first: a pipe may close early
    except NotWrittenError:
        _print(diagnosis, as_json)  # what was measured is not lost
        raise
    _print(diagnosis, as_json)
    if written:
        typer.echo(written, err=as_json)
    raise typer.Exit(code(diagnosis, fail))


def code(diagnosis: "Diagnosis", fail: bool) -> int:
    """The exit code. fail: it tells a collapse."""
    return COLLAPSED if fail and diagnosis.verdict.collapsed else 0


def _print(diagnosis: "Diagnosis", as_json: bool) -> None:
    if as_json:
        typer.echo(diagnosis.to_json())
    else:
        show(diagnosis)


def show(diagnosis: "Diagnosis") -> None:
    """The table, the verdict with its cautions, and what to try."""
    verdict, terminal = diagnosis.verdict, console()
    terminal.print(diagnosis.table())
    paragraph(terminal, verdict.sentence, style="bold red" if verdict.collapsed else "bold green")
    paragraph(terminal, verdict.sure, bullet=" · ")
    for caution in verdict.cautions:
        paragraph(terminal, caution, bullet=" · ")
    for advice in verdict.advice:
        paragraph(terminal, advice.reason, bullet=" → ")
        paragraph(terminal, advice.code, bullet="   ", style="cyan")


def paragraph(terminal: Console, words: str, *, bullet: str = "", style: str = "") -> None:
    """A sentence, wrapped with an indent on a terminal and on one line elsewhere."""
    if not terminal.is_terminal:
        terminal.print(Text(bullet + words), soft_wrap=True)
        return
    grid = Table.grid()
    grid.add_row(*([bullet] if bullet else []), Text(words, style=style))
    terminal.print(grid)


def _written(diagnosis: "Diagnosis", place: Path) -> str:
    """Write the files; the answer names them."""
    files = [diagnosis.save(place / "diagnosis.json")]
    try:
        files.append(diagnosis.report(place / "report.html"))
    except ImportError as error:
        note(f"There is no report: {error}")
    return f"Written: {' and '.join(map(str, files))}"
