"""The benchmarks' command: a device that is not there is refused, and groups that need the CPU; mending a file."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import mending
from benchmarks.measure import peak_memory, speed_ratio

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    run = [sys.executable, "-m", "benchmarks", "--device", "cuda"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


def test_only_groups_of_the_kernel_run_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "set_default_device", chosen.append)
    with pytest.raises(SystemExit):
        command.use_gpu(argparse.ArgumentParser(), ["kernel", "text"])
    assert "text measure the CPU" in capsys.readouterr().err
    command.use_gpu(argparse.ArgumentParser(), ["kernel", "losses"])
    assert chosen == ["cuda"]


def test_ratio_and_memory_on_the_cpu() -> None:
    ratio, slow, fast = speed_ratio(lambda: sum(range(200_000)), lambda: sum(range(2_000)), rounds=3)
    assert ratio > 5
    assert slow > fast
    if sys.platform == "linux":
        assert 20 < peak_memory("", "torch.ones(n, 1024)", 1, 8192) < 60  # 32 MiB


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_mending_measures_a_file_that_has_something_to_mend() -> None:
    peak, time = mending.files(rows=3000)
    assert 100 < peak.measured < 1024
    assert "3,000 × 384" in peak.detail
    assert time.detail.startswith("all_but_the_top, mean cosine 0.5")
