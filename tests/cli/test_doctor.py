"""uncollapse doctor."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from uncollapse import __version__, pairwise
from uncollapse.backbones import torchvision_ops
from uncollapse.cli import doctor, doctor_gpu
from uncollapse.cli.doctor import Finding

Run = Callable[..., Result]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without importing the optional libraries, which takes seconds each; and on a disk that is good enough."""
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "import_module", lambda name: None)
    monkeypatch.setattr(doctor, "LOW_DISK_SPACE", 0)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("light")
def test_all_is_well_here(run: Run) -> None:
    result = run("doctor", "--json")
    facts = json.loads(result.stdout)
    found = {(finding["group"], finding["name"]): finding for finding in facts["findings"]}
    bad = [finding for finding in facts["findings"] if finding["state"] == "bad"]
    assert (result.exit_code, facts["healthy"], bad) == (0, True, [])
    assert found["Versions", "uncollapse"]["words"] == __version__
    assert found["Versions", "torch"]["words"] == metadata.version("torch")
    assert "cores" in found["Devices", "cpu"]["words"]
    assert found["Files", "here"]["state"] == "good"
    assert {name for group, name in found if group == "Self-check"} >= {
        "kernel, cpu, float32",
        "kernel, cpu, float16",
        "kernel, cpu, bfloat16",
        "diagnosis",
        "cure",
    }
    assert all(
        finding["remedy"]
        for finding in facts["findings"]
        if finding["group"] == "Optional parts" and finding["state"] != "good"
    )


def test_what_it_says_on_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("Versions", "python", "good", "3.11"),
        Finding("Optional parts", "timm", "missing", "vision models", 'pip install "uncollapse[timm]"'),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    result = run("doctor")
    assert result.exit_code == 0
    assert "✓ python" in result.stdout
    assert '→ pip install "uncollapse[timm]"' in result.stdout
    assert result.stdout.endswith("All is well. Optional and not fully installed: timm.\n")
    findings.append(Finding("Self-check", "kernel", "bad", "off by 1"))
    result = run("doctor")
    assert result.exit_code == 1
    assert "Problems: kernel." in result.stdout
    assert json.loads(run("doctor", "--json").stdout)["healthy"] is False


def requires(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: list(lines))


def test_a_plain_installation_is_well_and_says_what_could_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    requires(monkeypatch, "torch>=2.6", 'not-there>=1; extra == "timm"', "uncollapse[hf,train]; extra == 'text'")
    (timm,) = [finding for finding in doctor._check_extras() if finding.name == "timm"]
    assert (timm.state, timm.remedy) == ("missing", 'pip install "uncollapse[timm]"')
    assert timm.words == "vision models from timm: not installed: not-there"
    assert not any(finding.name == "text" for finding in doctor._check_extras())


def test_an_old_or_broken_library_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    requires(monkeypatch, "torch>=99.1", 'rich (>=13) ; extra == "report"')
    old = next(finding for finding in doctor._check_versions() if finding.name == "torch")
    assert (old.state, "99.1 or later is needed" in old.words) == ("bad", True)

    def broken(name: str) -> None:
        raise RuntimeError("operator x::y\ndoes not exist")

    monkeypatch.setattr(doctor, "import_module", broken)
    (report,) = [finding for finding in doctor._check_extras() if finding.name == "report"]
    assert report.state == "bad"
    assert report.words.endswith("cannot be imported: operator x::y does not exist")


def test_a_version_with_fewer_numbers_is_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.0")
    assert doctor._check_requirement(doctor.Requirement("torch", "2.0.0", None)) == ("good", "2.0")
    assert doctor._check_requirement(doctor.Requirement("torch", "2.0.1", None))[0] == "bad"


def test_without_metadata_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert [finding.name for finding in doctor._check_versions()] == ["python", "uncollapse"]


def test_the_extras_are_those_of_the_package() -> None:
    named = metadata.metadata("uncollapse").get_all("Provides-Extra")
    assert {"hf", "timm", "pyg", "train", "text", "data", "report", "gguf"} <= set(named or ()) & set(doctor.USES)


def test_torchvision_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision") if torchvision_ops.declare() is None else None
    for declared, state in ((True, "missing"), (False, "good")):
        monkeypatch.setattr(torchvision_ops, "is_declared", lambda declared=declared: declared)
        (found,) = doctor._check_torchvision()
        assert found.state == state


def test_folders_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    found = doctor._check_folder("here", tmp_path, "results")
    assert (found.state, found.words) == ("bad", f"{tmp_path} cannot be written to: Permission denied")


def test_little_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOW_DISK_SPACE", 2**80)
    assert doctor._check_folder("here", tmp_path / "new", "results").remedy == "free some space on that disk"
    assert not (tmp_path / "new").exists()


def test_offline_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert doctor._check_hub().state == "good"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor._check_hub().remedy == "unset HF_HUB_OFFLINE"


def results() -> Iterator[Finding]:
    return (finding for finding in doctor._run_self_checks() if finding.name.startswith("kernel, cpu"))


def test_the_self_check_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pairwise.softmax_mean
    monkeypatch.setattr(pairwise, "softmax_mean", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    assert {finding.name: finding.state for finding in results()}["kernel, cpu, float32"] == "bad"


def test_the_self_check_tells_what_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr(pairwise, "softmax_mean", broken)
    for finding in results():
        assert (finding.state, finding.words) == ("bad", "failed: no such operator")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_report_without_a_gpu(run: Run) -> None:
    result = run("doctor", "--gpu")
    assert result.exit_code == 2
    assert "no CUDA or ROCm device" in " ".join(result.output.split())
    assert run("doctor", "--gpu", "--json").exit_code == 2


def test_gpu_report_runs_every_kernel() -> None:
    """In Triton's interpreter, on few rows: the same lines as on a GPU."""
    pytest.importorskip("triton")
    code = """
import torch
from uncollapse.cli import doctor_gpu
doctor_gpu.ROUNDS = 1
for line, good in doctor_gpu.check_gpu(torch.device("cpu"), size=40):
    print(good, line)
"""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    lines = done.stdout.splitlines()
    assert all(line.startswith("True") for line in lines), done.stdout
    assert sum("as fast as dense" in line for line in lines) == 9


def test_gpu_report_says_which_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    lines = list(doctor_gpu.check_gpu(torch.device("cpu"), size=16))
    failed = [line for line, good in lines if not good]
    assert len(failed) == 9
    assert all("FAILED: UsageError" in line for line in failed)


def test_gpu_report_survives_a_peer_that_fails() -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no process group")

    case = next(doctor_gpu.cases(16, torch.device("cpu")))
    words = doctor_gpu._next_to_peer(dataclasses.replace(case, peer=broken), [torch.ones(2, 2)], 1.0)
    assert words == ", Inf-CL failed: RuntimeError: no process group"
    assert doctor_gpu._next_to_peer(case, [], 1.0) == ""
