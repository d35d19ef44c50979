"""uncollapse doctor."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uncollapse.cli import console
from uncollapse.cli.options import flag
from uncollapse.cli.progress import ProgressBar

if TYPE_CHECKING:
    from uncollapse.cli.health_doc import Finding

MARKS = {"good": ("✓", "green"), "missing": ("–", "yellow"), "bad": ("✗", "bold red")}
NAMES = 24  # columns


def doctor(
    as_json: Annotated[bool, flag("--json", "Print the findings as JSON and nothing else.")] = False,
) -> None:
    """Examine the installation: versions, devices, optional parts and how to get them, and a self-check."""
    from uncollapse.cli import health_doc

    found = []
    with ProgressBar() as waiting:
        waiting.stage("Examining")
        for finding in health_doc.examine():
            found.append(finding)
            waiting.stage(f"Examined: {finding.name}")
    if as_json:
        facts = {"healthy": not _bad(found), "findings": [dataclasses.asdict(finding) for finding in found]}
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        _show(found)
    raise typer.Exit(1 if _bad(found) else 0)


def _bad(found: "list[Finding]") -> "list[Finding]":
    return [finding for finding in found if finding.state == "bad"]


def _show(found: "list[Finding]") -> None:
    terminal = console.stdout_console()
    for group in dict.fromkeys(finding.group for finding in found):
        terminal.print(Text(group, style="bold"))
        for finding in found:
            if finding.group == group:
                _line(terminal, finding)
    console.print_paragraph(terminal, _sum(found), style="bold red" if _bad(found) else "bold green")


def _line(terminal: Console, finding: "Finding") -> None:
    """The mark, the name, what was found, and below it what to do."""
    sign, style = MARKS[finding.state]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=3, justify="right")
    grid.add_column(width=NAMES, no_wrap=True)
    grid.add_row(Text(sign, style=style), Text(finding.name), Text(finding.words))
    if finding.remedy:
        grid.add_row("", "", Text(f"→ {finding.remedy}", style="cyan"))
    terminal.print(grid)


def _sum(found: "list[Finding]") -> str:
    if bad := _bad(found):
        return f"Not well: {', '.join(finding.name for finding in bad)}. What to do stands behind the arrows."
    absent = [finding.name for finding in found if finding.state == "missing" and finding.remedy]
    return f"All is well. Optional, and not or not wholly there: {', '.join(absent)}." if absent else "All is well."
