"""The command `uncollapse embeddings`: measure a file of embeddings, and mend it."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from uncollapse import distributed
from uncollapse.cli import console
from uncollapse.cli.options import OUTPUT, AsJson, FailOnCollapse, Name, flag, option
from uncollapse.cli.progress import ProgressBar, count_steps
from uncollapse.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.embeddings.transform import EmbeddingTransform
    from uncollapse.io.embedding_rows import Rows

INTERVALS = "Alignment and uniformity"
MEND = "Mend"
FOR_COSINE = "This is for rows that are compared by cosine; train classifiers on the originals."
SHOWN = ("mean_cosine", "robust_cosine", "effective_rank", "rank_share", "uniformity", "uniformity_gap")


def embeddings(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Rows of features: .npy, .npz, .parquet, .arrow, .csv, .tsv, .jsonl, .pt, .safetensors, .faiss "
            "(flat); or a folder or pattern of such files, or a folder of `datasets`.",
        ),
    ],
    pairs: Annotated[Path | None, option("FILE", "The second views of the same rows, for alignment.")] = None,
    key: Annotated[
        str | None, option("NAME", "The array or column, if a file has several.", None, "--key", "--column")
    ] = None,
    pairs_key: Annotated[str | None, option("NAME", "The same for --pairs, if it differs from --key.")] = None,
    level: Annotated[float, option("SHARE", "Confidence level of the intervals.", INTERVALS)] = 0.95,
    draws: Annotated[int, option("N", "Bootstrap resamples for the intervals; 0 for none.", INTERVALS)] = 1000,
    t: Annotated[float, option("T", "Sharpness of the potential in uniformity.", INTERVALS)] = 2.0,
    alpha: Annotated[float, option("A", "Exponent of the distances in alignment.", INTERVALS)] = 2.0,
    mend: Annotated[
        str | None,
        option(
            "METHOD",
            "Write changed embeddings to --out: auto, center, all_but_the_top[:K], whiten[:SHRINKAGE] or pca:DIMS. "
            "auto chooses one of them, or none.",
            MEND,
        ),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Only print what --mend would do.", MEND)] = False,
    force: Annotated[bool, flag("--force", "Mend even if no gain is expected.", MEND)] = False,
    name: Name = None,
    out: Annotated[
        Path | None,
        option(
            "PATH",
            "Folder for diagnosis.json and report.html, by default named after the file; with --mend the new file.",
            OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
    fail_on_collapse: FailOnCollapse = False,
) -> None:
    """Measure the rank, uniformity and alignment of embeddings in a file, which may be larger than memory."""
    from uncollapse.io.embedding_files import open_rows

    distributed.join_group("cpu")  # first: errors are then printed once, not by each process
    name = name or file.stem
    if mend is not None:
        if pairs is not None or pairs_key is not None or fail_on_collapse:
            given = "--fail-on-collapse" if pairs is None and pairs_key is None else "--pairs"
            raise UsageError(f"{given} cannot be combined with --mend; run the command again on the new file.")
        asked = {"t": t, "alpha": alpha, "level": level, "draws": draws}
        return _mend(open_rows(file, key), mend, name, asked, Mending(out, dry_run, force, as_json))
    if pairs_key is not None and pairs is None:
        raise UsageError("--pairs-key requires --pairs FILE.")
    if dry_run or force:
        raise UsageError("--dry-run and --force require --mend METHOD.")
    place = console.output_folder(out, name, as_json)
    rows = open_rows(file, key)
    second = None if pairs is None else _open_pairs(rows, pairs, key, pairs_key)
    asked = {"t": t, "alpha": alpha, "level": level, "draws": draws}
    with ProgressBar() as waiting:
        diagnosis = _measure(rows, second, name, asked, waiting)
    if distributed.is_launch_rank_zero():
        console.deliver(diagnosis, place=place, as_json=as_json, fail=fail_on_collapse)


def _measure(
    rows: "Rows",
    second: "Rows | None",
    name: str,
    asked: dict[str, Any],
    waiting: ProgressBar,
    transform: "EmbeddingTransform | None" = None,
    data: str = "",
) -> "Diagnosis":
    """Diagnose all rows, and fit a transform to them. Each process reads its share, in a thread of its own.

    data: what the rows are, in words; the file if not given.
    """
    from uncollapse.diagnosis.build import Labels
    from uncollapse.diagnosis.embeddings import diagnose_rows
    from uncollapse.io.embedding_rows import prefetch

    labels = Labels(name, data or f"{rows.words}: {rows.count:,} rows")
    own = rows.share(distributed.rank(), distributed.world_size())
    pairs = None if second is None else prefetch(second.share(distributed.rank(), distributed.world_size()).parts())
    done = waiting.stage(f"Reading {rows.paths[0].name}", own.part_count())
    try:
        parts = count_steps(prefetch(own.parts()), done)
        given = parts if transform is None else prefetch(_fit_each(parts, transform))
        with _one_thread_per_operation() as workers:
            return diagnose_rows(given, pairs=pairs, labels=labels, gather=True, workers=workers, **asked)
    except ValueError as error:  # the content of the file cannot be measured
        raise UsageError(str(error)) from error


@contextmanager
def _one_thread_per_operation() -> Iterator[int]:
    """Yield how many threads torch had, for as many workers: the threads of an operation wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _open_pairs(rows: "Rows", path: Path, key: str | None, pairs_key: str | None) -> "Rows":
    from uncollapse.io.embedding_files import open_rows
    from uncollapse.io.embedding_rows import NamelessError

    try:
        second = open_rows(path, pairs_key or key)
    except NamelessError:
        if pairs_key is not None:
            raise
        second = open_rows(path)  # the key is that of the embeddings
    if (rows.count, rows.dim) != (second.count, second.dim):
        raise UsageError(
            f"Pairs must have the shape of the embeddings, ({rows.count}, {rows.dim}), "
            f"got ({second.count}, {second.dim}) in {path}."
        )
    return second


@dataclass(frozen=True)
class Mending:
    """How to mend: where to, whether only to advise, whether also without an expected gain, and whether as JSON.

    as_advised: whether the method is the one that is advised.
    """

    out: Path | None
    dry_run: bool
    force: bool
    as_json: bool
    as_advised: bool = True


def _mend(rows: "Rows", method: str, name: str, asked: dict[str, Any], how: Mending) -> None:
    """Fit a transform while the rows are measured; write the changed rows, and compare both."""
    from uncollapse.io.embedding_files import check_target, open_rows, write_changed

    if distributed.launch_size() > 1:
        raise UsageError("--mend runs in one process; start it without a launcher.")
    transform = parse_method(method)
    if how.out is None and not how.dry_run:
        raise UsageError("--mend writes a new file: name it with --out NEW, or use --dry-run.")
    if how.out is not None:
        check_target(rows, how.out)
    with ProgressBar() as waiting:
        before = _measure(rows, None, name, asked, waiting, transform)
    advice, used = transform.advice_, transform.method_
    how = replace(how, as_advised=used == advice.method and transform.k in (None, advice.k))
    declined = advice.method == "none" and not how.force
    outcome = {"method": used, "advice": advice.method, "reason": advice.reason, "written": None}
    if how.dry_run or declined or how.out is None or used == "none":
        return _report_mending(outcome, [before], how)
    with ProgressBar() as waiting:
        done = waiting.stage(f"Writing {how.out.name}", rows.part_count())
        source = replace(rows, read=lambda first, last: count_steps(rows.read(first, last), done))
        with _one_thread_per_operation():
            outcome["written"] = str(write_changed(source, how.out, transform.transform, transform.n_features_out_))
        try:
            new = open_rows(how.out, rows.key)
            after = _measure(new, None, f"{name} after {used}", asked, waiting, data=before.data)
        except KeyboardInterrupt:
            console.print_note(f"{how.out} is complete; it was not measured, and its report was not written.")
            raise
    _report_mending(outcome, [before, after], how)


def parse_method(text: str) -> "EmbeddingTransform":
    """Return the transform that --mend names, such as whiten or pca:128."""
    from uncollapse.embeddings.transform import METHODS, EmbeddingTransform

    method: Any
    method, colon, number = text.partition(":")
    names = {"all_but_the_top": ("k", int), "pca": ("dims", int), "whiten": ("shrinkage", float)}
    if method not in METHODS:
        raise UsageError(f"--mend takes one of {', '.join(METHODS)}, got {text!r}.{did_you_mean(method, METHODS)}")
    if not colon:
        return EmbeddingTransform(method)
    argument, kind = names.get(method, ("", int))
    try:
        return EmbeddingTransform(method, **{argument: kind(number)})
    except (ValueError, TypeError) as error:
        raise UsageError(f"--mend {text} is not valid; a number follows {', '.join(names)} only.") from error


def _report_mending(outcome: dict[str, Any], diagnoses: "list[Diagnosis]", how: Mending) -> None:
    """Print what was done and why, and write the report of both diagnoses next to the new file."""
    from uncollapse import report

    outcome["report"] = None
    if outcome["written"] is not None and how.out is not None:
        first, second = diagnoses
        cautions = (_describe(outcome, how), *second.verdict.cautions)
        second = replace(second, verdict=replace(second.verdict, cautions=cautions))
        outcome["report"] = str(report.write([first, second], how.out.with_suffix(".html")))
    if how.as_json:
        facts = [{"name": d.model} | {key: m.mean for key, m in d.layers[0].measures.items()} for d in diagnoses]
        typer.echo(json.dumps(outcome | {"measures": facts}, ensure_ascii=False))
        return
    terminal = console.stdout_console()
    if len(diagnoses) > 1:
        terminal.print(_before_and_after(*diagnoses))
    console.print_paragraph(terminal, _describe(outcome, how), style="bold")
    for path in (outcome["written"], outcome["report"]):
        if path is not None:
            typer.echo(f"Written: {path}")


def _before_and_after(before: "Diagnosis", after: "Diagnosis") -> Table:
    """Return the measures of both, one per row."""
    from uncollapse.diagnosis.measures import MEASURES
    from uncollapse.io.display import format_value
    from uncollapse.report.words import IN_PERCENT

    table = Table("measure", box=box.SIMPLE_HEAD)
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    first, second = before.layers[0], after.layers[0]
    for name in (name for name in SHOWN if name in first.measures and name in second.measures):
        unit = ", %" if name in IN_PERCENT else ""
        table.add_row(MEASURES[name].short + unit, format_value(first[name]), format_value(second[name]))
    return table


def _describe(outcome: dict[str, Any], how: Mending) -> str:
    from uncollapse.diagnosis.reference_data import embedding_outlook

    used, advised, reason = outcome["method"], outcome["advice"], outcome["reason"]
    counts = embedding_outlook(advised != "none") if advised in ("none", "all_but_the_top") else ""  # not of center
    like = f" {counts[0].upper()}{counts[1:]}." if counts else ""
    written = "" if outcome["written"] is not None else " Nothing was written."
    if advised == "none" and outcome["written"] is None:
        rest = "" if how.dry_run or used == "none" else " --force mends them all the same."
        return f"Leave these embeddings as they are: {reason}.{like}{written}{rest}"
    if advised == "none":
        return f"{used} was applied, although {reason}.{like} {FOR_COSINE}"
    if how.as_advised:
        return f"{used} {'is advised' if written else 'was applied'}, because {reason}.{like} {FOR_COSINE}{written}"
    asked = f"{used} {'would be' if written else 'was'} applied as asked for."
    return f"{asked} The advice is {advised}, because {reason}.{like} {FOR_COSINE}{written}"


def _fit_each(parts: "Iterable[Tensor]", transform: "EmbeddingTransform") -> "Iterator[Tensor]":
    """Yield the parts, and fit a transform to each."""
    for part in parts:
        transform.partial_fit(part)
        yield part
