"""Measure targets, print the table, write results/benchmarks*.json. Run it on an idle machine: `make bench`.

The file is written after each row, so that a run that was stopped keeps what it measured; `complete` says whether all
rows are there.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import uncollapse as uc
from benchmarks import (
    attaching,
    diagnosing,
    gathering,
    graphs,
    hypersphere,
    mending,
    peers,
    streaming,
    targets,
    text,
    vision,
)
from benchmarks.targets import Result
from uncollapse.lab.runs.results import processor_name

GROUPS = {
    "kernel": targets.kernel,
    "neighbour": targets.neighbour,
    "kernel_memory": targets.kernel_memory,
    "metrics": targets.metrics,
    "losses": targets.losses,
    "start": targets.start,
    "diagnose": diagnosing.overhead,
    "attach": attaching.cost,
    "graphs": graphs.training,
    "text": text.training,
    "vision": vision.training,
    "hypersphere": hypersphere.training,
    "gather": gathering.training,
    "peers": peers.beside_peers,
    "streaming": streaming.reading,
    "mending": mending.files,
}

KERNEL = ["kernel", "neighbour", "kernel_memory", "metrics", "losses"]  # in one file; the others have their own
ONE_THREAD = ("text", "vision", "hypersphere")  # as their recipes train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=GROUPS, nargs="*", default=KERNEL)
    parser.add_argument("--out", type=Path, help="default: results/benchmarks.json, or that of the one group named")
    parser.add_argument(
        "--rows", type=int, default=streaming.ROWS, help="of the file that `streaming` and `mending` read"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the kernel's groups, on a GPU")
    args = parser.parse_args()
    if args.device == "cuda":
        use_gpu(parser, args.only)
    groups = GROUPS | {
        "streaming": lambda: streaming.reading(args.rows),
        "mending": lambda: mending.files(args.rows),
    }
    out = args.out or usual_file(args.only, args.device)
    if all(group in ONE_THREAD for group in args.only):
        torch.set_num_threads(1)
    results: list[Result] = []
    console, started = Console(), time.perf_counter()
    for group in args.only:
        for result in groups[group]():
            results.append(result)
            console.print(f"{result.name}: {result.measured:.3g} {result.unit}", highlight=False)
            if out is not None:
                write(out, record(results, args.only, started, complete=False))
    console.print(table(results))
    if out is not None:
        write(out, record(results, args.only, started, complete=True))
        console.print(f"Written to {out}.")


def usual_file(groups: list[str], device: str) -> Path | None:
    """Return where the results of these groups are stored; nowhere if they are neither all of a file nor one group."""
    if groups == KERNEL:
        return Path("results/benchmarks.json" if device == "cpu" else "results/benchmarks_cuda.json")
    if len(groups) == 1 and groups[0] not in KERNEL:
        return Path(f"results/benchmarks_{groups[0]}.json")
    return None


def write(out: Path, found: dict[str, object]) -> None:
    out.parent.mkdir(exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(out)


def use_gpu(parser: argparse.ArgumentParser, groups: list[str]) -> None:
    """Make tensors on the GPU by default; exit with status 2 where there is none, or where a group needs the CPU."""
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device. Leave --device out to measure on the CPU.")
    if others := [group for group in groups if group not in KERNEL]:
        parser.error(f"{', '.join(others)} measure the CPU. On a GPU there are: {', '.join(KERNEL)}.")
    torch.set_default_device("cuda")


def table(results: list[Result]) -> Table:
    shown = Table("what", "target", "measured", "", "detail", title="Targets and measurements")
    for r in results:
        mark = {True: "[green]reached[/]", False: "[red]missed[/]", None: ""}[r.reached]
        shown.add_row(r.name, f"{r.bound} {r.unit}", f"{r.measured:.3g}", mark, r.detail)
    return shown


def record(results: list[Result], groups: list[str], started: float, complete: bool) -> dict[str, object]:
    return {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "config": {
            "groups": groups,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.get_default_device().type == "cuda" else "cpu",
            "cores": os.cpu_count(),
            "load": load(),
            "seed": 0,
        },
        "versions": {"uncollapse": uc.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "processor": processor_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "complete": complete,
        "targets": [
            {
                "name": r.name,
                "target": r.bound,
                "measured": round(r.measured, 4),
                "unit": r.unit,
                "reached": r.reached,
                "detail": r.detail,
            }
            for r in results
        ],
    }


def load() -> float:
    """How many programs wanted the processors lately, this one included; beyond their number, times are too long."""
    return round(os.getloadavg()[0], 1)


if __name__ == "__main__":
    main()
