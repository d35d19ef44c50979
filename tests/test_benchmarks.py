"""The benchmarks' command: devices, groups, rows stored at once, missing libraries; mending a file."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import attaching, mending, peers
from benchmarks.measure import busy_neighbour, peak_memory, speed_ratio
from benchmarks.targets import Result

from uncollapse.registry import CURES

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


def test_a_run_that_is_stopped_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[Result]:
        yield Result("first", 1.0, 2.0, "s", False, "")
        raise KeyboardInterrupt

    out = tmp_path / "found.json"
    monkeypatch.setitem(command.GROUPS, "start", rows)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "start", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        command.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["name"] for row in found["targets"]] == ["first"]
    assert not found["complete"]


def test_importing_the_benchmarks_registers_no_cure() -> None:
    assert attaching.DENSE not in CURES


def test_groups_have_files_of_their_own() -> None:
    assert command.usual_file(command.KERNEL, "cpu") == Path("results/benchmarks.json")
    assert command.usual_file(["peers"], "cpu") == Path("results/benchmarks_peers.json")
    assert command.usual_file(["kernel"], "cpu") is None


def test_a_library_that_is_not_installed_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "PEERS", {"no_such_library": peers.nnsight})
    assert list(peers.beside_peers()) == []
    assert "Skipped no_such_library" in capsys.readouterr().err


def test_the_neighbour_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args: started.append(popen(*args)) or started[0])
    with busy_neighbour():
        assert started[0].poll() is None
    assert started[0].poll() is not None
