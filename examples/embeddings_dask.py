"""Diagnose embeddings in many parquet files with Dask: each worker measures
one file, and the statistics are merged.

A task reads one file and returns `uc.RowStatistics`, a few megabytes for any
size of file. Pairs of these are merged, then pairs of pairs. Merging is exact,
so the order in which workers finish does not matter. The same works with Ray,
Spark or a queue of batch jobs: create statistics with their own seed, send or
save them, merge, diagnose.

    python examples/embeddings_dask.py parts/    # workers on this machine
    python examples/embeddings_dask.py parts/ --column first --pairs second
    python examples/embeddings_dask.py parts/ --scheduler tcp://10.0.0.1:8786

The last one uses a cluster that sees the same folder.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uncollapse as uc
from uncollapse.errors import UsageError, import_optional
from uncollapse.io.embedding_files import open_rows


def main() -> None:
    """Measure all files of a folder, print the diagnosis, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of .parquet files with the same columns")
    parser.add_argument("--column", help="column with the embeddings, if a file has several columns of lists")
    parser.add_argument("--pairs", help="column with the second views of the same rows, for alignment")
    parser.add_argument("--workers", type=int, default=2, help="processes on this machine")
    parser.add_argument("--scheduler", help="address of a cluster to use instead")
    parser.add_argument("--out", type=Path, help="JSON file for the diagnosis")
    args = parser.parse_args()
    files = sorted(args.folder.resolve().glob("*.parquet"))
    if not files:
        parser.error(f"there is no .parquet file in {args.folder}")
    with workers(args.scheduler, args.workers) as client:
        parts = [client.submit(measured, file, args.column, args.pairs, seed) for seed, file in enumerate(files)]
        whole: uc.RowStatistics = merged(client, parts).result()
    diagnosis = whole.diagnosis(
        labels=uc.Labels(model=args.folder.name, data=f"{len(files)} files: {whole.count} rows")
    )
    print(diagnosis)
    if args.out is not None:
        diagnosis.save(args.out)


def measured(file: Path, column: str | None, pairs: str | None, seed: int) -> uc.RowStatistics:
    """Return the statistics of one file. A worker runs this; its memory does not grow with the file."""
    rows = open_rows(file, column)
    statistics = uc.RowStatistics(rows.dim, seed=seed)
    if pairs is None:
        for part in rows.parts():
            statistics.update(part)
    else:
        for part, second in zip(rows.parts(), open_rows(file, pairs).parts(), strict=True):
            statistics.update(part, second)
    return statistics


def merged(client: Any, parts: list[Any]) -> Any:
    """Merge the statistics in pairs, then in pairs of pairs, on the workers; only the result is sent here."""
    while len(parts) > 1:
        pairs = [client.submit(uc.RowStatistics.merge, *pair) for pair in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


@contextmanager
def workers(address: str | None, count: int) -> Iterator[Any]:
    """Yield a client of the cluster at `address`, or of processes on this machine with one thread each."""
    distributed: Any = import_optional("dask.distributed", "dask")
    if address is not None:
        with distributed.Client(address) as client:
            yield client
        return
    options = {"n_workers": count, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:  # such as a library that is not installed
        sys.exit(f"Error: {error}")
