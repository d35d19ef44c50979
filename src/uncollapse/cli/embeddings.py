"""The command `uncollapse embeddings`: measure a file of embeddings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uncollapse import distributed
from uncollapse.cli import console
from uncollapse.cli.options import AsJson, FailOnCollapse, Name, Out, option
from uncollapse.cli.progress import ProgressBar, count_steps
from uncollapse.errors import UsageError

if TYPE_CHECKING:
    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.io.embedding_rows import Rows

INTERVALS = "Alignment and uniformity"


def embeddings(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help=".npy, .npz, .parquet or .safetensors with rows of features; or a folder or pattern of such files.",
        ),
    ],
    pairs: Annotated[Path | None, option("FILE", "The second views of the same rows, for alignment.")] = None,
    key: Annotated[
        str | None, option("NAME", "The array or column, if a file has several.", None, "--key", "--column")
    ] = None,
    level: Annotated[float, option("SHARE", "Confidence level of the intervals.", INTERVALS)] = 0.95,
    draws: Annotated[int, option("N", "Bootstrap resamples for the intervals; 0 for none.", INTERVALS)] = 1000,
    t: Annotated[float, option("T", "Sharpness of the potential in uniformity.", INTERVALS)] = 2.0,
    alpha: Annotated[float, option("A", "Exponent of the distances in alignment.", INTERVALS)] = 2.0,
    name: Name = None,
    out: Out = None,
    as_json: AsJson = False,
    fail_on_collapse: FailOnCollapse = False,
) -> None:
    """Measure embeddings in a file, which may be larger than memory: rank, uniformity, alignment of pairs."""
    from uncollapse.io.embedding_files import open_rows

    distributed.join_group("cpu")  # first: errors are then printed once, not by each process
    name = name or file.stem
    if out is not None or not as_json:
        console.check_writable(console.output_folder(out, name))
    rows = open_rows(file, key)
    second = None if pairs is None else _open_pairs(rows, pairs, key)
    asked = {"t": t, "alpha": alpha, "level": level, "draws": draws}
    with ProgressBar() as waiting:
        diagnosis = _measure(rows, second, name, asked, waiting)
    if distributed.is_launch_rank_zero():
        console.deliver(diagnosis, out=out, as_json=as_json, fail=fail_on_collapse)


def _measure(
    rows: "Rows", second: "Rows | None", name: str, asked: dict[str, Any], waiting: ProgressBar
) -> "Diagnosis":
    """Diagnose all rows. Each process reads its share, in a thread of its own."""
    from uncollapse.diagnosis.build import Labels
    from uncollapse.diagnosis.embeddings import diagnose_rows
    from uncollapse.io.embedding_rows import prefetch

    labels = Labels(name, f"{rows.words}: {rows.count} rows")
    own = rows.share(distributed.rank(), distributed.world_size())
    beside = None if second is None else prefetch(second.share(distributed.rank(), distributed.world_size()).parts())
    done = waiting.stage(f"Reading {rows.paths[0].name}", own.part_count())
    try:
        return diagnose_rows(
            count_steps(prefetch(own.parts()), done), pairs=beside, labels=labels, gather=True, **asked
        )
    except ValueError as error:  # the content of the file cannot be measured
        raise UsageError(str(error)) from error


def _open_pairs(rows: "Rows", path: Path, key: str | None) -> "Rows":
    from uncollapse.io.embedding_files import open_rows

    second = open_rows(path, key)
    if (rows.count, rows.dim) != (second.count, second.dim):
        raise UsageError(
            f"Pairs must have the shape of the embeddings, ({rows.count}, {rows.dim}), "
            f"got ({second.count}, {second.dim}) in {path}."
        )
    return second
