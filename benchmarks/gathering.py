"""Losses over the rows of two processes, compared with gathering all keys and holding the logits of own rows.

Both are timed in the same two processes, in turn. Memory is the growth of the peak of a process, measured in separate
processes. The plain way is InfoNCE in both directions as in CLIP's open code: keys are gathered with their gradients,
and each process computes the logits of its own rows against all keys.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.nn.functional as D
import torch.nn.functional as F
from torch import Tensor, distributed

import uncollapse as uc
from benchmarks.measure import speed_ratio, training_step
from benchmarks.targets import Result
from uncollapse.pairwise import all_ranks

COUNT, DIM, TEMPERATURE, FEW = 2, 128, 0.5, 64
ROUNDS = {4096: 9, 16384: 3}  # by the total number of rows


def training() -> Iterator[Result]:
    """Measure speed and memory of a training step."""
    for batch, rounds in ROUNDS.items():
        found = _in_processes("time", batch, rounds)[0]
        name, ratio = f"InfoNCE {batch}×{DIM} both ways, rows spread over {COUNT} processes", found["ratio"]
        detail = f"{found['plain'] * 1e3:.0f} ms plain, {found['ours'] * 1e3:.0f} ms ours, of {COUNT} processes"
        yield Result(name, 1.0, ratio, "× as fast", True, detail)
        before, after = (max(each["MiB"] for each in _in_processes(way, batch, 1)) for way in ("plain", "ours"))
        detail = f"{before:.0f} MiB plain, {after:.0f} MiB ours, in each process"
        yield Result("  its memory", 1.0, after / before, "of the memory", False, detail)


def _in_processes(what: str, batch: int, rounds: int) -> list[dict[str, float]]:
    """Return what each process measured."""
    with tempfile.TemporaryDirectory() as folder:
        given = [what, str(batch), str(rounds), folder]
        commands = [[sys.executable, "-m", "benchmarks.gathering", str(rank), *given] for rank in range(COUNT)]
        started = [subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) for command in commands]
        codes = [each.wait() for each in started]
        if any(codes):
            raise RuntimeError(f"The processes of the benchmark ended with {codes}.")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(COUNT)]


def process(rank: int, what: str, batch: int, rounds: int, folder: Path) -> None:
    """Measure in one of the processes and write the result to the folder."""
    warnings.simplefilter("ignore", FutureWarning)  # torch will rename what the plain way uses
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=COUNT)
    if what == "time":
        torch.testing.assert_close(plain(*rows(rank, batch)), ours(*rows(rank, batch)), rtol=1e-5, atol=1e-5)
        theirs, mine = (training_step(way, *rows(rank, batch)) for way in (plain, ours))
        found = dict(zip(("ratio", "plain", "ours"), speed_ratio(theirs, mine, rounds), strict=True))
    else:
        ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"plain": plain, "ours": ours}
        training_step(ways[what], *rows(rank, FEW))()
        before = _peak()
        training_step(ways[what], *rows(rank, batch))()
        found = {"MiB": _peak() - before}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()  # neither leaves while the other still communicates
    distributed.destroy_process_group()


def ours(x: Tensor, y: Tensor) -> Tensor:
    return uc.info_nce(x, y, temperature=TEMPERATURE, symmetric=True, gather=True)


def plain(x: Tensor, y: Tensor) -> Tensor:
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    all_x, all_y = (torch.cat(D.all_gather(view)) for view in (x, y))  # type: ignore[no-untyped-call]
    partner = torch.arange(len(x)) + distributed.get_rank() * len(x)
    forth = F.cross_entropy(x @ all_y.T / TEMPERATURE, partner)
    back = F.cross_entropy(y @ all_x.T / TEMPERATURE, partner)
    return all_ranks.total((forth + back) / 2) / COUNT


def rows(rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return the rows of this process, of two views (batch, DIM)."""
    x, noise = torch.randn(2, batch, DIM, generator=torch.Generator().manual_seed(0))
    share = slice(rank * batch // COUNT, (rank + 1) * batch // COUNT)
    return x[share], (x + 0.5 * noise)[share]


def _peak() -> float:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    process(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    os._exit(0)  # gloo threads may still run, and the interpreter would abort
