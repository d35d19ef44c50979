"""A disk that is full, read-only or broken, a folder that vanishes.

Each ends in one sentence, which names the file and says what to do, and an exit code that is not 0; what was there
before is as it was. Errors in place of an operation come from a patched `os`, and a few from small disks of their own.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .machine import Answer, Machine, litter, points
from .remains import check_whole, said
from .scenes import DIAGNOSE, NEEDED, SCENES, TABLE, TRAIN, furnish
from .server import tree

Count = Callable[[str, object], None]
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO")
FEW = {"train": 5, "train with everything": 5, "diagnose": 4, "report": 3, "table": 4, "embeddings": 3, "monitor": 3}
FEW |= {"tune": 3, "cure": 3}
WORDS = ("No space left on device", "Disk quota exceeded", "Read-only file system", "Permission denied")
WORDS += ("Input/output error", "not writable", "disk is full", "readonly", "unable to open", "disk I/O error")


@pytest.fixture
def first(machine: Machine, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with what a scene needs."""
    folder = furnish(tmp_path / "first")
    for needed in NEEDED.get(request.param, ()):
        assert machine.run(folder, *needed).code == 0
    return folder


def check_told(answer: Answer, folder: Path) -> None:
    """One sentence with a file below the folder, the reason and what to do."""
    assert answer.code in (1, 2), (answer.code, answer.err)
    sentence = answer.sentence
    assert any(word in sentence for word in WORDS), sentence
    assert any(name in sentence for name in ("results", "runs", "out", "models", "study")), sentence
    assert any(advice in sentence for advice in ("Make room", "Free some", "Name a", "name another")), sentence
    assert ".part" not in sentence, sentence


@pytest.mark.parametrize(("first", "name"), [(name, name) for name in FEW], indirect=["first"])
def test_an_operation_is_refused(
    machine: Machine, tmp_path: Path, first: Path, name: str, record_property: Count
) -> None:
    whole = Path(shutil.copytree(first, tmp_path / "whole"))
    counted = machine.run(whole, *SCENES[name], watched=whole)
    chosen = points(counted.operations, FEW[name], seed=1)
    for number, at in enumerate(chosen):
        folder = Path(shutil.copytree(first, tmp_path / f"refused-{at}"))
        answer = machine.run(folder, *SCENES[name], watched=folder, fault=ERRORS[number % len(ERRORS)], at=at)
        if answer.code:  # the last operations tidy up: a result that is written counts
            check_told(answer, folder)
        else:
            assert said(whole).items() <= said(folder).items(), (at, answer.err)  # checkpoints may be left
        check_whole(folder)
        assert machine.run(folder, *SCENES[name]).code == 0
        assert said(folder) == said(whole), at
        assert litter(folder) == []
        shutil.rmtree(folder)
    record_property("cases", len(chosen))


COMMANDS: dict[str, list[str]] = {
    "train": [*TRAIN, "--track", "jsonl"],
    "keep": [*TRAIN, "--save", "--again"],
    "diagnose": [*DIAGNOSE, "--out", "out"],
    "embeddings": SCENES["embeddings"],
    "report": SCENES["report"],
    "tune": SCENES["tune"],
    "table --html": [*TABLE, "--html", "out/page.html"],
    "table --markdown": [*TABLE, "--markdown", "out/table.md"],
}
ROOMS = (0, 12288)


@pytest.fixture(scope="module")
def furnished(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a result, a kept model, diagnoses, and old output that a command would replace."""
    folder = furnish(tmp_path_factory.mktemp("disk") / "first")
    for needed in ([*TRAIN, "--save"], *NEEDED["report"], SCENES["diagnose"]):
        assert machine.run(folder, *needed).code == 0
    (folder / "out" / "table.md").write_text("old\n")
    (folder / "out" / "page.html").write_text("<html>old</html>\n")
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_small_disk(machine: Machine, tmp_path: Path, furnished: Path, name: str, record_property: Count) -> None:
    """Really full, with some room left: not enough for what is written last. And really read-only."""
    cases = 0
    arguments = [*COMMANDS[name], "--seed", "1"] if name == "train" else COMMANDS[name]
    for disk in ({"room": room} for room in ROOMS):
        cases += _small(machine, tmp_path, furnished, arguments, disk)
    cases += _small(machine, tmp_path, furnished, arguments, {"read_only": True})
    record_property("cases", cases)


def _small(machine: Machine, tmp_path: Path, furnished: Path, arguments: list[str], disk: dict[str, object]) -> int:
    folder = Path(shutil.copytree(furnished, tmp_path / f"disk-{'-'.join(map(str, disk.values()))}"))
    before = tree(folder)
    answer = machine.run(folder, *arguments, disk=disk)
    if answer.code == 0:  # it was room enough
        assert not disk.get("read_only")
        return 0
    check_told(answer, folder)
    new = {name for name in answer.tree if name not in before and "step-" not in name}
    kept = {name: digest for name, digest in answer.tree.items() if name in before}
    changed = {name for name in before if kept.get(name) != before[name]}
    assert not [name for name in new if "/." in name or name.endswith((".part", ".lock"))], new
    assert changed <= {"out/diagnosis.json"}, changed  # it is written before the report, which has no room
    return 1


def test_a_sweep_on_a_small_disk(machine: Machine, tmp_path: Path, furnished: Path, record_property: Count) -> None:
    """Its run fails in a process of its own, and cannot even say so in a file; read-only is told before it begins."""
    grid = ["sweep", *TRAIN[1:2], "--grid", "seed=1 nodes=180 layers=2 hidden=8 epochs=3", "--jobs", "1"]
    for disk, told in (
        ({"room": 8192}, "cannot be written: No space left on device. Make room"),
        ({"read_only": True}, "Results cannot go to results/gcn-depth: it is not writable. Name another folder."),
    ):
        folder = Path(shutil.copytree(furnished, tmp_path / "-".join(disk)))
        before, answer = tree(folder), machine.run(folder, *grid, disk=disk)
        assert answer.code in (1, 2)
        assert told in answer.err
        assert "Traceback" not in answer.err
        assert {name: digest for name, digest in answer.tree.items() if name in before} == before
        assert not [name for name in answer.tree if name.endswith((".part", ".lock"))]
    record_property("cases", 2)


def test_a_limit_on_the_size_of_files(
    machine: Machine, furnished: Path, tmp_path: Path, record_property: Count
) -> None:
    folder = Path(shutil.copytree(furnished, tmp_path / "limited"))
    answer = machine.run(folder, *SCENES["diagnose"], limit=100_000)
    assert answer.code == 2
    assert "out/report.html cannot be written: File too large. Raise the limit" in answer.sentence
    assert "block 1" in answer.out  # what was measured is shown all the same
    check_whole(folder)
    record_property("cases", 1)


@pytest.mark.parametrize(
    ("first", "name"), [(name, name) for name in ("train", "diagnose", "report")], indirect=["first"]
)
def test_a_folder_vanishes(machine: Machine, tmp_path: Path, first: Path, name: str, record_property: Count) -> None:
    """It is made again where that can be, or told; never half a result."""
    cases = 0
    for gone in ("results", "runs") if name == "train" else ("out",):
        whole = Path(shutil.copytree(first, tmp_path / f"whole-{gone}"))
        for at in points(machine.run(whole, *SCENES[name], watched=whole / gone).operations, 2, seed=2):
            folder = Path(shutil.copytree(first, tmp_path / f"{gone}-{at}"))
            answer = machine.run(folder, *SCENES[name], watched=folder / gone, fault="vanish", at=at)
            if answer.code:
                assert gone in answer.sentence, answer.err
            check_whole(folder)
            assert machine.run(folder, *SCENES[name]).code == 0
            assert litter(folder) == []
            assert said(folder) == said(whole), at
            cases += 1
    record_property("cases", cases)


def test_output_that_nobody_takes(machine: Machine, furnished: Path, record_property: Count) -> None:
    """`uncollapse … > /dev/full`."""
    answer = machine.run(furnished, "list", "cures", out="/dev/full")
    assert answer.code != 0
    assert "Traceback" not in answer.err
    record_property("cases", 1)
