"""Measure targets, print the table, write results/benchmarks*.json. Run it on an idle machine: `make bench`."""

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import uncollapse as uc
from benchmarks import attaching, diagnosing, gathering, graphs, hypersphere, mending, streaming, targets, text, vision
from benchmarks.targets import Result

GROUPS = {
    "kernel": targets.kernel,
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
    "streaming": streaming.reading,
    "mending": mending.files,
}

WHOLE = (  # kept apart
    *("start", "diagnose", "attach", "graphs", "text", "vision", "hypersphere", "gather", "streaming", "mending"),
)
KERNEL = [x for x in GROUPS if x not in WHOLE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=GROUPS, nargs="*", default=KERNEL)
    parser.add_argument("--out", type=Path, help="default for the default groups: results/benchmarks.json")
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
    usual = Path("results/benchmarks.json" if args.device == "cpu" else "results/benchmarks_cuda.json")
    out = args.out or (usual if args.only == KERNEL else None)
    if args.only in (["text"], ["vision"], ["hypersphere"]):
        torch.set_num_threads(1)  # as their recipes train
    results: list[Result] = []
    console = Console()
    for group in args.only:
        for result in groups[group]():
            results.append(result)
            console.print(f"{result.name}: {result.measured:.3g} {result.unit}", highlight=False)
    console.print(table(results))
    if out is not None:
        out.parent.mkdir(exist_ok=True)
        temporary = out.with_suffix(".tmp")
        temporary.write_text(json.dumps(record(results, args.only), indent=1, ensure_ascii=False) + "\n")
        temporary.replace(out)
        console.print(f"Written to {out}.")


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


def record(results: list[Result], groups: list[str]) -> dict[str, object]:
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
        "processor": _processor(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [x for x in info.read_text().splitlines() if x.startswith("model name")] if info.is_file() else []
    return names[0].split(":")[1].strip() if names else platform.processor()


if __name__ == "__main__":
    main()
