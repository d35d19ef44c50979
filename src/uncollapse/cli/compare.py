"""The command `uncollapse compare`: diagnoses of several models, or of one before and after a change."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from uncollapse.cli import console
from uncollapse.cli.console import escape_controls
from uncollapse.cli.options import flag, option
from uncollapse.errors import UsageError

if TYPE_CHECKING:
    from uncollapse.diagnosis.result import Diagnosis, Layer

REPORT = Path("uncollapse-comparison.html")
SHOWN = ("mean_cosine", "robust_cosine", "effective_rank", "rank_share", "dataset_rank_share")


def compare(
    files: Annotated[
        list[Path], typer.Argument(metavar="A.json B.json", help="Diagnoses; the first is the reference.")
    ],
    out: Annotated[
        Path | None, option("FILE", f"The report with all of them in the same plots; {REPORT} if not given.")
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
    words = {other.model: report.difference(diagnoses[0], other) for other in diagnoses[1:]}
    if as_json:
        typer.echo(json.dumps({"diagnoses": [_facts(d) for d in diagnoses], "differences": words}, ensure_ascii=False))
    else:
        _print(diagnoses, words)
    if out is not None or not as_json:
        try:
            typer.echo(f"Written: {report.write(diagnoses, out or REPORT)}", err=as_json)
        except ImportError as error:
            console.print_note(f"No report was written: {error}")


def _print(diagnoses: "list[Diagnosis]", words: dict[str, list[str]]) -> None:
    terminal = console.stdout_console()
    terminal.print(_table(diagnoses))
    for diagnosis in diagnoses:
        for cure in diagnosis.settings.get("cures", ()):
            console.print_paragraph(terminal, f"{diagnosis.model}: with {cure}")
    for name, sentences in words.items():
        console.print_paragraph(terminal, f"{diagnoses[0].model} → {name}", style="bold")
        for sentence in sentences:
            console.print_paragraph(terminal, sentence, bullet=" · ")


def _read(path: Path) -> "Diagnosis":
    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.io import typed_json

    path = path / "diagnosis.json" if path.is_dir() else path  # the folder that `diagnose --out` wrote
    try:
        return Diagnosis.of(escape_controls(typed_json.parse(path.read_bytes())))
    except OSError as error:
        raise UsageError(f"The diagnosis {path} cannot be read: {error.strerror}.") from error
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


def _last(diagnosis: "Diagnosis") -> "Layer":
    """Return the residual stream after the last block."""
    from uncollapse.backbones.sites import OUTPUT

    blocks = [layer for layer in diagnosis.layers if layer.place == OUTPUT]
    return next((layer for layer in reversed(blocks) if layer.name != "final"), blocks[-1])


def _table(diagnoses: "list[Diagnosis]") -> Table:
    from uncollapse.diagnosis.measures import MEASURES

    table = Table("model", "verdict", "from", "last block", box=box.SIMPLE_HEAD)
    shown = [name for name in SHOWN if any(name in _last(d).measures for d in diagnoses)]
    for name in shown:
        table.add_column(MEASURES[name].short, justify="right")
    for diagnosis in diagnoses:
        last, verdict = _last(diagnosis), diagnosis.verdict
        kind = Text(verdict.kind, style="red" if verdict.collapsed else "green")
        numbers = (f"{last[name]:.3g}" if name in last.measures else "–" for name in shown)
        table.add_row(Text(diagnosis.model), kind, Text(verdict.onset or "–"), Text(last.name), *numbers)
    return table


def _facts(diagnosis: "Diagnosis") -> dict[str, Any]:
    last, verdict = _last(diagnosis), diagnosis.verdict
    measures = {name: summary.mean for name, summary in last.measures.items()}
    facts = {"model": diagnosis.model, "verdict": verdict.kind, "onset": verdict.onset}
    return facts | {"last_block": last.name, "measures": measures}
