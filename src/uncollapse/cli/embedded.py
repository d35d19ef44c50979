"""uncollapse embeddings."""

from pathlib import Path
from typing import Annotated

import typer

from uncollapse import diagnosing
from uncollapse.cli import output
from uncollapse.cli.options import AsJson, FailOnCollapse, Name, Out, option
from uncollapse.cli.waiting import Waiting
from uncollapse.embeddings import Rows, open_rows
from uncollapse.loading.errors import UsageError

INTERVALS = "Alignment and uniformity"


def embeddings(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help=".npy, .npz, .parquet or .safetensors with rows of features.")
    ],
    pairs: Annotated[Path | None, option("FILE", "The second views of the same rows, for alignment.")] = None,
    key: Annotated[
        str | None, option("NAME", "The array or column, where a file has several.", None, "--key", "--column")
    ] = None,
    level: Annotated[float, option("SHARE", "Level of the intervals of alignment and uniformity.", INTERVALS)] = 0.95,
    draws: Annotated[int, option("N", "Resamples behind the intervals; 0 for none.", INTERVALS)] = 1000,
    t: Annotated[float, option("T", "Sharpness of the potential in uniformity.", INTERVALS)] = 2.0,
    alpha: Annotated[float, option("A", "Exponent of the distances in alignment.", INTERVALS)] = 2.0,
    name: Name = None,
    out: Out = None,
    as_json: AsJson = False,
    fail_on_collapse: FailOnCollapse = False,
) -> None:
    """Measure a file of embeddings, which may be larger than memory: how even they lie, how close pairs are."""
    name = name or file.stem
    if out is not None or not as_json:
        output.check_writable(output.folder(out, name))
    rows = open_rows(file, key)
    second = None if pairs is None else _second(rows, pairs, key)
    with Waiting() as waiting:
        progress = waiting.stage(f"Reading {file.name}", rows.part_count())
        try:
            diagnosis = diagnosing.diagnose_rows(
                rows.parts(),
                pairs=None if second is None else second.parts(),
                t=t,
                alpha=alpha,
                level=level,
                draws=draws,
                name=name,
                data=f"{rows.words}: {rows.count} rows",
                progress=progress,
            )
        except ValueError as error:  # what is in the file cannot be measured
            raise UsageError(str(error)) from error
    output.deliver(diagnosis, out=out, as_json=as_json, fail=fail_on_collapse)


def _second(rows: Rows, path: Path, key: str | None) -> Rows:
    second = open_rows(path, key)
    if (rows.count, rows.dim) != (second.count, second.dim):
        raise UsageError(
            f"Pairs must have the shape of the embeddings, ({rows.count}, {rows.dim}), "
            f"got ({second.count}, {second.dim}) in {path}."
        )
    return second
