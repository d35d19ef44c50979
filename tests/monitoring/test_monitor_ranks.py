"""The monitor in two processes: one measures and writes, both learn what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from uncollapse.monitoring.monitor import CollapseWarning, Monitor, Rule

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(seed))


def train(rank: int, folder: Path, watched: bool) -> dict[str, Any]:
    """A few steps with dropout; what this process knows at the end."""
    torch.manual_seed(0)
    inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True), 2)
    model = DistributedDataParallel(inner)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(rank)
    rules = [Rule("uniformity", above=-100, patience=2, then="stop")]
    monitor = Monitor([batch(9)], every=2, rules=rules, folder=folder, log=lambda step, values: logged.append(step))
    logged: list[int] = []
    records = []
    for step in range(4):
        x = batch(10 * step + rank)
        optimiser.zero_grad()
        F.mse_loss(model(x), x.roll(1, 1)).backward()
        optimiser.step()
        if watched:
            record = monitor.step(model, step)
            records.append(None if record is None else record.curves)
            if monitor.should_stop:
                break
        elif step == 2:
            break
    weights = [parameter.detach().clone() for parameter in inner.parameters()]
    return {"steps": step, "records": records, "logged": logged, "weights": weights}


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = {"bare": train(rank, folder / "none", watched=False)}
    if rank == 0:
        with pytest.warns(CollapseWarning, match=r"uniformity.*above"):
            found["watched"] = train(rank, folder / "run", watched=True)
    else:
        found["watched"] = train(rank, folder / "run", watched=True)
    with pytest.raises((ValueError, RuntimeError), match="such layer") as told:
        Monitor([batch(9)], every=1, rules=[Rule("uniformity", 7, above=-1)]).step(nn.TransformerEncoder(layer(), 1), 0)
    found["error"] = told.type.__name__
    with pytest.raises((ValueError, RuntimeError), match="weights"):
        Monitor([batch(9)], every=1).step(fully_shard(nn.TransformerEncoder(layer(), 1)), 0)
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()  # neither leaves while the other still talks to it
    distributed.destroy_process_group()


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def test_two_processes(tmp_path: Path) -> None:
    commands = [[sys.executable, __file__, str(rank), str(tmp_path)] for rank in range(2)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for each in started:
            problems = each.communicate(timeout=60)[1]
            assert each.returncode == 0, problems
    finally:
        for each in started:
            each.kill()  # one that waits for the other
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (first["error"], second["error"]) == ("ValueError", "PeerError")
    for found in (first, second):
        assert found["watched"]["steps"] == 2  # the stop reached both
        pairs = zip(found["bare"]["weights"], found["watched"]["weights"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert first["watched"]["records"] == second["watched"]["records"]
    assert [record is not None for record in second["watched"]["records"]] == [True, False, True]
    assert (first["watched"]["logged"], second["watched"]["logged"]) == ([0, 2], [])
    written = (tmp_path / "run" / "monitor.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in written] == [0, 2]


if __name__ == "__main__":
    process(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # all is saved; threads of gloo may still run, and an interpreter that ends under them aborts
