"""Run the zoo: every architecture in a process of its own, the results in one file.

python -m tests.zoo                         # what results/zoo.json lacks
python -m tests.zoo --only 'timm/*' --again # some of it once more
"""

import argparse
import multiprocessing
import os
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()

from .check import check  # noqa: E402
from .entries import Entry, all_entries  # noqa: E402
from .results import NOT_BUILT, ZooFile, describe  # noqa: E402

LIMIT = 240  # seconds for one architecture


def main() -> None:
    """Check the architectures that are not in the file yet."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/zoo.json"))
    parser.add_argument("--only", default="*", help="names, such as 'timm/*,torch/*'")
    parser.add_argument("--status", help="only those that have this status in the file")
    parser.add_argument("--again", action="store_true", help="also those that are in the file")
    parser.add_argument("--nice", type=int, default=19, help="how far other processes go first, from 0 to 19")
    parser.add_argument("--minutes", type=float, default=120.0, help="stop after this time")
    given = parser.parse_args()
    os.nice(given.nice)
    torch.set_num_threads(1)
    file, started = ZooFile(given.out), time.monotonic()
    chosen = [e for e in all_entries() if any(fnmatchcase(e.name, pattern) for pattern in given.only.split(","))]
    # The oldest first, so that runs can be continued; among rows of one age, any part of a run is a sample of all.
    for entry in sorted(chosen, key=lambda e: (file.ran(e.name), crc32(e.name.encode()))):
        known = file.status(entry.name)
        if (known and not given.again) or (given.status and known != given.status):
            continue
        if time.monotonic() - started > 60 * given.minutes:
            break
        row = in_own_process(entry)
        file.add(row)
        print(f"{file.status(entry.name):10} {entry.name}  {row.get('reason', '')[:150]}", flush=True)
    print(file.summary())


def in_own_process(entry: Entry, limit: float = LIMIT) -> dict[str, Any]:
    """Check an architecture in a fork of this process; one that hangs or dies is a result as well."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(entry, theirs))
    process.start()
    theirs.close()
    try:
        row: dict[str, Any] = (
            ours.recv() if ours.poll(limit) else _stopped(entry, f"no result after {limit:.0f} seconds")
        )
    except EOFError:
        row = _stopped(entry, "the process died")
    process.kill()
    process.join()
    return row


def _stopped(entry: Entry, message: str) -> dict[str, Any]:
    return {"name": entry.name, "kind": entry.kind, "diagnose": {"status": "failed", "message": message}}


def _work(entry: Entry, pipe: Any) -> None:
    for stream in (sys.stdout, sys.stderr):  # libraries talk
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    try:
        pipe.send(check(entry))
    except BaseException as error:  # of the zoo itself
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{describe(error)} ({last.filename.rpartition('/')[2]}:{last.lineno})"
        pipe.send({"name": entry.name, "kind": entry.kind, NOT_BUILT: f"the check itself failed: {message}"})


if __name__ == "__main__":
    main()
