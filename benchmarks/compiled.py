"""Compile the Triton kernels for GPUs that need not be there, and read what they take from the compiled objects.

    python -m benchmarks.compiled            # all kernels, into results/triton_compiled.json; about ten minutes

Each kernel is compiled as `pairwise.fused` launches it: the launches are recorded instead of made.
"""

import argparse
import datetime
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from uncollapse.pairwise import Pairs, fused

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
}
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # most bytes of shared memory per program
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.uint8: "u8"}
CONFIGURATIONS = [
    *((torch.bfloat16, width, "all") for width in (64, 128, 192, 384, 768, 1024)),
    *((torch.float32, width, "all") for width in (16, 32, 128, 768)),
    (torch.float16, 128, "all"),
    *((torch.bfloat16, width, "none") for width in (128, 768)),
    (torch.float32, 128, "none"),
]
SHOWN = ("kernel", "dtype", "width", "options", "target", "registers", "spilled", "shared")
ROWS = 256  # any number of rows: it is not compiled in


class Launch(NamedTuple):
    """A kernel, its blocks, its arguments and its constants."""

    kernel: Any
    size: fused.Blocks
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Taken(NamedTuple):
    """What a compiled kernel takes: registers per thread, bytes of them spilled to memory, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def launches(dtype: torch.dtype, width: int, options: str, amd: bool) -> dict[str, Launch]:
    """Return the launches of every kernel for rows and values of this width: with all options, or with none."""
    x, sums = torch.empty(1, ROWS, width, dtype=dtype), torch.zeros(1, ROWS)
    mean, kind = torch.zeros(1, ROWS, width), torch.zeros(1, ROWS, dtype=torch.uint8)
    pairs, bias = Pairs(), None
    if options == "all":
        pairs, bias = Pairs(offset=0, no_self=True, excluded=torch.zeros(2, 4, dtype=torch.int64)), sums
    saved = mean, sums, kind, torch.empty(1, 0, 0)
    forward = _record(lambda: fused.forward(x, x, x, bias, 1.0, pairs), amd)
    backward = _record(lambda: fused.backward(x, x, x, bias, 1.0, pairs, saved, mean, sums), amd)
    both = _record(lambda: fused.log_sums(x, x, 1.0, True), amd)
    both_backward = _record(lambda: fused.log_sums_backward(sums, sums, sums, sums, x, x, 1.0, True), amd)
    columns = _record(lambda: fused.spread(x, x, x, bias, 1.0, pairs), amd)
    return {
        "mean and log-sum-exp": forward[0],
        "gradient of the queries": backward[0],
        "gradient of keys and values": backward[1],
        "columns": columns[1],
        "log-sum-exps both ways": both[0],
        "gradient both ways": both_backward[0],
    }


def _record(call: Callable[[], object], amd: bool) -> list[Launch]:
    """Return what a function of `fused` would launch."""
    seen: list[Launch] = []
    launch, blocks = fused._launch, fused.blocks
    fused._launch = lambda kernel, size, programs, arguments, options: seen.append(
        Launch(kernel, size, arguments, options)
    )
    fused.blocks = lambda kernel, dtype, width: blocks(kernel, dtype, width, amd)  # type: ignore[misc, assignment]
    try:
        call()
    finally:
        fused._launch, fused.blocks = launch, blocks
    return seen


def compile_launch(launch: Launch, target: str) -> Taken:
    """Compile a kernel as the launcher would, with pointers that are multiples of 16 bytes."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {**launch.options, "ROWS": launch.size.rows}
    aligned: dict[tuple[int], list[list[object]]] = {}
    for place, (name, value) in enumerate(zip(launch.kernel.arg_names, launch.arguments, strict=False)):
        if value is None:
            constants[name] = None
        elif isinstance(value, Tensor):
            types[name], aligned[(place,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        else:
            types[name] = "i32" if isinstance(value, int) else "fp32"
    signature = {name: types.get(name, "constexpr") for name in launch.kernel.arg_names}
    source = ASTSource(launch.kernel, signature, constants, aligned)
    options = {"num_warps": launch.size.warps, "num_stages": launch.size.stages}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    return _read_amd(compiled) if target == "gfx942" else _read_nvidia(compiled)


def _read_nvidia(compiled: Any) -> Taken:
    """Read registers and the stack, to which registers are spilled, from the cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed)}
    return Taken(found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared)


def _read_amd(compiled: Any) -> Taken:
    """Read vector registers and scratch memory, to which they are spilled, from the metadata of the code object."""
    found = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)", compiled.asm["amdgcn"])}
    return Taken(found["vgpr_count"], found["private_segment_fixed_size"], compiled.metadata.shared)


def table(
    configurations: Iterable[tuple[torch.dtype, int, str]], targets: Iterable[str], kernels: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Yield what each kernel takes, in each configuration and for each target; kernels: only these."""
    targets = list(targets)
    for dtype, width, options in configurations:
        for target in targets:
            for name, launch in launches(dtype, width, options, amd=target == "gfx942").items():
                if not kernels or name in kernels:
                    yield {
                        "kernel": name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "width": width,
                        "options": options,
                        "target": target,
                        "blocks": launch.size._asdict(),
                        **compile_launch(launch, target)._asdict(),
                        "shared_limit": SHARED[target],
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/triton_compiled.json"))
    args = parser.parse_args()
    rows = []
    for row in table(CONFIGURATIONS, TARGETS):
        rows.append(row)
        print(*(row[key] for key in SHOWN), flush=True)
    record = {
        "command": "python -m benchmarks.compiled",
        "versions": {"triton": triton.__version__, "torch": torch.__version__},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kernels": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
