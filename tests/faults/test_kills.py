"""SIGKILL in the middle of a command: at any operation on files, or at any time.

Whatever then has its name is whole, and the same command ends as if nothing had happened. CI takes a few points of
each command; UNCOLLAPSE_FAULTS=all takes every one.
"""

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .machine import ALL, Answer, Machine, litter, points
from .remains import check_whole, said
from .scenes import NEEDED, SCENES, furnish

FEW = {"train": 7, "train with everything": 6, "train again": 4, "diagnose": 3, "report": 2, "table": 2}
FEW |= {"embeddings": 2, "monitor": 6, "tune": 6, "cure": 4}


@pytest.fixture
def scene(machine: Machine, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """A new folder with what a scene needs."""
    first = furnish(tmp_path / "first")
    for needed in NEEDED.get(request.param, ()):
        assert machine.run(first, *needed).code == 0

    def new(name: str) -> Path:
        return Path(shutil.copytree(first, tmp_path / name))

    return new


def ended(machine: Machine, folder: Path, arguments: list[str]) -> Answer:
    """Run it to its end, and look whether anything is left that should not be."""
    answer = machine.run(folder, *arguments)
    assert answer.code == 0, answer.err
    check_whole(folder)
    assert litter(folder) == []
    return answer


@pytest.mark.parametrize(("scene", "name"), [(name, name) for name in SCENES], indirect=["scene"])
def test_killed_at_an_operation(
    machine: Machine, scene: Callable[[str], Path], name: str, record_property: Callable[[str, object], None]
) -> None:
    whole = scene("whole")
    counted = machine.run(whole, *SCENES[name], watched=whole)
    assert counted.code == 0, counted.err
    chosen = points(counted.operations, FEW[name])
    for at in chosen:
        folder = scene(f"killed-{at}")
        assert machine.run(folder, *SCENES[name], watched=folder, fault="kill", at=at).code == -signal.SIGKILL
        check_whole(folder)
        ended(machine, folder, SCENES[name])
        assert said(folder) == said(whole), at
        shutil.rmtree(folder)
    record_property("cases", len(chosen))


@pytest.mark.parametrize("scene", ["train"], indirect=True)
def test_killed_again_and_again(
    machine: Machine, scene: Callable[[str], Path], record_property: Callable[[str, object], None]
) -> None:
    """Three times at operations, and at times of the clock, before it may end."""
    whole, folder, chance, kills = scene("whole"), scene("killed"), random.Random(1), 0
    arguments = SCENES["train with everything"]
    ended(machine, whole, arguments)
    for _ in range(12 if ALL else 3):
        machine.run(folder, *arguments, watched=folder, fault="kill", at=chance.randrange(1, 90))
        machine.run(folder, *arguments, after=chance.uniform(0, 0.4))
        check_whole(folder)
        kills += 2
    ended(machine, folder, arguments)
    assert said(folder) == said(whole)
    record_property("cases", kills)
