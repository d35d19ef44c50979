"""The command `uncollapse compare`: diagnoses of several models, or of one before and after a change."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Column, Table
from rich.text import Text

from uncollapse.cli import console
from uncollapse.cli.console import escape_controls
from uncollapse.cli.options import flag, option
from uncollapse.errors import UsageError, similar_file

if TYPE_CHECKING:
    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.report.comparison import Comparison

REPORT = Path("uncollapse-comparison.html")
OPTIONAL = ("mean cosine", "last block", "effective rank", "rank share", "robust cosine")  # columns, least first
LONGEST_NAME = 24  # letters of a name on one line of a narrow terminal


def compare(
    files: Annotated[
        list[Path], typer.Argument(metavar="A.json B.json", help="Diagnoses; the first is the reference.")
    ],
    out: Annotated[
        Path | None, option("FILE", f"Report file with all diagnoses in the same plots; {REPORT} if not given.")
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print the comparison as JSON and nothing else; writes a report only with --out.")
    ] = False,
) -> None:
    """Compare diagnoses, such as those of a model before and after a change."""
    from uncollapse import report

    if len(files) < 2:
        raise UsageError("A comparison needs at least two diagnoses, got one.")
    if out is not None and out.is_dir():
        raise UsageError(f"{out} is a folder; --out takes the name of the report file.")
    diagnoses = _distinguish([_read(path) for path in files], files)
    comparison = report.compare(diagnoses)
    words = comparison.differences
    if as_json:
        typer.echo(json.dumps({"diagnoses": [_facts(d) for d in diagnoses], "differences": words}, ensure_ascii=False))
    else:
        _print(comparison)
    if out is not None or not as_json:
        try:
            typer.echo(f"Written: {report.write(diagnoses, out or REPORT)}", err=as_json)
        except ImportError as error:
            console.print_note(f"No report was written: {error}")


def _print(comparison: "Comparison") -> None:
    terminal = console.stdout_console()
    terminal.print(_table(comparison, terminal.width))
    for diagnosis in comparison.diagnoses:
        for cure in diagnosis.settings.get("cures", ()):
            console.print_paragraph(terminal, f"{diagnosis.model}: with {cure}")
    for name, sentences in comparison.differences.items():
        console.print_paragraph(terminal, f"{comparison.names[0]} → {name}", style="bold")
        for sentence in sentences:
            console.print_paragraph(terminal, sentence, bullet=" · ")


def _read(path: Path) -> "Diagnosis":
    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.io import typed_json

    ours = "pass a diagnosis.json that `uncollapse diagnose` wrote, or its folder"
    path = path / "diagnosis.json" if path.is_dir() else path  # the folder that `diagnose --out` wrote
    try:
        return Diagnosis.of(escape_controls(typed_json.parse(path.read_bytes())))
    except OSError as error:
        raise UsageError(
            f"The diagnosis {path} cannot be read: {error.strerror}; {ours}.{similar_file(path)}"
        ) from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not a readable diagnosis: it is not JSON; {ours}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a readable diagnosis: {error}") from error


def _distinguish(diagnoses: "list[Diagnosis]", files: list[Path]) -> "list[Diagnosis]":
    """Add the files' names where two diagnoses have the same model name, such as before and after."""
    names = Counter(d.model for d in diagnoses)
    paths = [path.parent.name if path.stem == "diagnosis" and path.parent.name else path.stem for path in files]
    titles = [
        f"{d.model} ({path})" if names[d.model] > 1 else d.model for d, path in zip(diagnoses, paths, strict=True)
    ]
    seen: Counter[str] = Counter()
    for number, title in enumerate(titles):
        seen[title] += 1
        titles[number] = title if seen[title] == 1 else f"{title} #{seen[title]}"
    return [replace(d, model=title) for d, title in zip(diagnoses, titles, strict=True)]


def _table(comparison: "Comparison", width: int) -> Table:
    from uncollapse.io.display import column_widths, exact_widths, fit_columns

    head, rows = comparison.grid()
    narrow = [[row[0][:LONGEST_NAME], *row[1:]] for row in rows]  # a longer name is folded
    head, narrow, _ = fit_columns(head, narrow, width, OPTIONAL)
    rows = [[name, *cells] for (name, *_), (_, *cells) in zip(rows, narrow, strict=True)]
    words = 4 if "last block" in head else 3
    table = Table(Column(head[0], overflow="fold"), box=box.SIMPLE_HEAD)
    for number, exact in enumerate(exact_widths(head, narrow, column_widths(head, narrow), width)[1:], 1):
        table.add_column(head[number], justify="left" if number < words else "right", width=exact)
    for name, kind, *others in rows:
        table.add_row(Text(name), Text(kind, style="green" if kind == "none" else "red"), *map(Text, others))
    return table


def _facts(diagnosis: "Diagnosis") -> dict[str, Any]:
    from uncollapse.report.comparison import last_block

    last, verdict = last_block(diagnosis), diagnosis.verdict
    measures = {name: summary.mean for name, summary in last.measures.items()}
    facts = {"model": diagnosis.model, "verdict": verdict.kind, "onset": verdict.onset}
    return facts | {"last_block": last.name, "measures": measures}
