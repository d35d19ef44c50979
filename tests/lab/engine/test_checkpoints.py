import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uncollapse.lab.engine.checkpoints import Checkpoint, Checkpoints


def saved(folder: Path, *steps: int, identity: str = "mine", keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder, identity, keep)
    for step in steps:
        save(checkpoints, step)
    return checkpoints


def save(checkpoints: Checkpoints, step: int, version: int = 0) -> None:
    """A checkpoint whose content is known from its step and version."""
    value = step + version / 2
    groups = {
        "model": {"weight": torch.full((50,), value, dtype=torch.float64), "count": torch.tensor(step)},
        "optimiser": {},
    }
    checkpoints.save(step, groups, {"version": version, "loss": 1 / (1 + value)})


def content(checkpoint: Checkpoint | None) -> tuple[int, int] | None:
    """Step and version, after a look at everything else."""
    if checkpoint is None:
        return None
    step, version = checkpoint.step, checkpoint.state["version"]
    value = step + version / 2
    assert checkpoint.state == {"version": version, "loss": 1 / (1 + value)}
    assert checkpoint.tensors["model"]["weight"].tolist() == [value] * 50
    assert checkpoint.tensors["model"]["count"].item() == step
    assert checkpoint.tensors["optimiser"] == {}
    return step, version


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_child(work: Callable[[], None]) -> int:
    """Exit code of a child process that does it: 0, or 1 if it raises. A fork, because importing torch takes long."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_comes_back_the_same(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "base": base,
        "shared": base[1:],
        "turned": base.t(),
        "spread": torch.ones(1).expand(3),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "empty": torch.empty(0, 3),
        "half": torch.randn(5).bfloat16(),
        "float16": torch.randn(5).half(),
        "double": torch.tensor([0.1, float("nan"), float("-inf")], dtype=torch.float64),
        "step": torch.tensor(2**62),
        "flag": torch.tensor(True),
        "random": torch.get_rng_state(),
    }
    checkpoints = Checkpoints(tmp_path / "new" / "folder", "mine")
    checkpoints.save(0, {"model": tensors, "no-tensors": {}}, {"epoch": 3})
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.step == 0
    assert loaded.state == {"epoch": 3}
    assert loaded.tensors["no-tensors"] == {}
    assert set(loaded.tensors["model"]) == set(tensors)
    for name, tensor in loaded.tensors["model"].items():
        torch.testing.assert_close(tensor, tensors[name].detach(), rtol=0, atol=0, equal_nan=True)
    loaded.tensors["model"]["base"].fill_(-1)
    assert loaded.tensors["model"]["shared"][0, 0] == 4  # no memory is shared any more


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_state_comes_back_to_the_bit(state: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), "mine")
        checkpoints.save(1, {}, state)
        loaded = checkpoints.load()
    assert loaded is not None
    assert repr(loaded.state) == repr(state)  # tells -0.0 from 0.0, and has all digits


def test_keeps_the_newest(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5, 10, 20, 1_000_000_000, 1_000_000_001)
    assert names(tmp_path) == ["step-1000000000", "step-1000000001"]
    assert content(checkpoints.load()) == (1_000_000_001, 0)
    one = saved(tmp_path / "one", 1, 2, keep=1)
    assert names(one.folder) == ["step-000000002"]


def test_an_earlier_step_removes_no_later_one(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 5)
    assert names(tmp_path) == ["step-000000005", "step-000000010", "step-000000020"]


def test_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    save(checkpoints, 2, version=1)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    assert content(checkpoints.load()) == (2, 1)


def test_nothing_there(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "missing", "mine").load() is None
    Checkpoints(tmp_path / "missing", "mine").clear()
    assert names(tmp_path) == []
    (tmp_path / "step-12").mkdir()  # not a name of ours
    (tmp_path / "step-000000001").write_text("a file")
    assert Checkpoints(tmp_path, "mine").load() is None


def test_damage_is_noticed(tmp_path: Path) -> None:
    """Every file, cut off or with one byte changed, at random places."""
    checkpoints, chance = saved(tmp_path, 1, 2), random.Random(0)
    newest = tmp_path / "step-000000002"
    for path in sorted(newest.iterdir()):
        intact = path.read_bytes()
        for _ in range(60):
            at = chance.randrange(len(intact))
            changed = intact[:at] + bytes([intact[at] ^ chance.randrange(1, 256)]) + intact[at + 1 :]
            path.write_bytes(chance.choice([changed, intact[:at]]))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = content(checkpoints.load())
            # Other white space in the JSON file says the same; only the line feed at its end may be missing.
            assert found == (1, 0) if told else found == (2, 0) and path.name == "state.json"
            assert all(str(newest) in str(warning.message) for warning in told)
        path.write_bytes(intact)
    assert content(checkpoints.load()) == (2, 0)


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: os.truncate(folder / "model.safetensors", 9), "model.safetensors has 9 bytes instead of "),
        (lambda folder: (folder / "state.json").unlink(), "state.json cannot be read .No such file or directory."),
        (lambda folder: (folder / "state.json").write_bytes(b"{\xff"), "state.json is damaged"),
        (lambda folder: (folder / "state.json").write_text("[" * 100_000), "state.json is damaged"),
        (lambda folder: (folder / "state.json").write_text("[]"), "state.json does not describe a checkpoint"),
        (lambda folder: rewrite(folder, format=2), "its format is 2, and this version of uncollapse reads 1"),
        (lambda folder: rewrite(folder, step=3), "the content of state.json is not what was written"),
        (lambda folder: folder.rename(folder.with_name("step-000000003")), "state.json is of step 2"),
    ],
)
def test_refused_with_the_reason(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    damage(tmp_path / "step-000000002")
    before = names(tmp_path)
    with pytest.warns(UserWarning, match=f"{reason}.*step 1"):
        assert content(checkpoints.load()) == (1, 0)
    assert names(tmp_path) == before


def test_another_run(tmp_path: Path) -> None:
    saved(tmp_path, 1, 3, identity="theirs")
    mine = Checkpoints(tmp_path, "mine")
    with pytest.warns(UserWarning, match=r"'theirs'.*'mine'") as told:
        assert mine.load() is None
    assert len(told) == 2
    for step in (2, 3, 4, 5):
        save(mine, step)
    assert names(tmp_path) == ["step-000000001", "step-000000004", "step-000000005"]  # 3 was replaced
    mine.clear()
    assert names(tmp_path) == ["step-000000001"]


def test_an_identity_that_is_not_exact(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, identity="mine-data")
    saved(tmp_path, 3, identity="mine2")
    assert Checkpoints(tmp_path, "mine").newest() is None
    assert Checkpoints(tmp_path, "mine-data").newest() == 2
    mine = Checkpoints(tmp_path, "mine", exact=False)
    assert mine.newest() == 2
    (tmp_path / "step-000000002" / "model.safetensors").unlink()
    assert mine.newest() == 1
    (tmp_path / "step-000000001" / "state.json").write_text("torn", encoding="utf-8")
    assert mine.newest() is None
    mine.clear()
    assert names(tmp_path) == ["step-000000003"]


def test_a_torn_one_does_not_count_as_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    (tmp_path / "step-000000002" / "model.safetensors").unlink()
    save(checkpoints, 3)
    assert names(tmp_path) == ["step-000000001", "step-000000002", "step-000000003"]
    checkpoints.clear()
    assert not tmp_path.exists()


def test_clear_leaves_other_files(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    (tmp_path / "metrics.jsonl").touch()
    checkpoints.clear()
    assert names(tmp_path) == ["metrics.jsonl"]


def test_leftovers_of_dead_processes_go(tmp_path: Path) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    for process in (dead, os.getpid(), os.getppid()):
        (tmp_path / f".step-000000007.{process}").mkdir()
        (tmp_path / f".step-000000007.{process}" / "model.safetensors").touch()
    saved(tmp_path, 1)
    assert names(tmp_path) == [f".step-000000007.{os.getppid()}", "step-000000001"]


def test_bad_arguments_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, "mine", keep=0)
    checkpoints = Checkpoints(tmp_path, "mine")
    with pytest.raises(ValueError, match="-1"):
        checkpoints.save(-1, {}, {})
    with pytest.raises(ValueError, match="model"):
        checkpoints.save(1, {"../model": {}}, {})
    with pytest.raises(TypeError, match="str"):
        checkpoints.save(1, {}, {"moments": [{2: 0.5}]})
    with pytest.raises(TypeError, match="JSON serializable"):
        checkpoints.save(1, {"model": {}}, {"when": object()})
    assert names(tmp_path) == []


def test_no_space(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)

    def fill_up() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(OSError, match="large"):
            checkpoints.save(2, {"model": {"weight": torch.ones(50_000)}}, {})

    assert in_child(fill_up) == 0
    assert names(tmp_path) == ["step-000000001"]
    assert content(checkpoints.load()) == (1, 0)


def on_disk_operation(folder: Path, number: int, act: Callable[[], None]) -> Callable[[], int]:
    """Act in place of the given operation on files below a folder; how many there were so far."""
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
            count += 1
            if count == number:
                act()

    sys.addaudithook(hook)  # stays for the life of the process: only for children
    return lambda: count


@pytest.mark.parametrize("step", [2, 3])
def test_death_before_any_operation(tmp_path: Path, step: int) -> None:
    """A save, of the same step or another one, that stops at each of its operations in turn."""
    before, outcomes = saved(tmp_path / "before", 1, 2).folder, []
    for number in range(1, 100):
        folder = tmp_path / str(number)
        checkpoints = Checkpoints(shutil.copytree(before, folder), "mine")

        def die(folder: Path = folder, number: int = number, checkpoints: Checkpoints = checkpoints) -> None:
            on_disk_operation(folder, number, lambda: os._exit(9))
            save(checkpoints, step, version=1)

        code = in_child(die)
        outcomes.append(content(checkpoints.load()))  # and without a warning
        save(checkpoints, step, version=1)  # the next process tidies up
        assert content(checkpoints.load()) == (step, 1)
        assert len(names(folder)) == 2
        if code == 0:
            break
    assert sorted(set(outcomes)) == [(2, 0), (step, 1)]
    assert outcomes == sorted(outcomes)
    assert len(outcomes) > 10


@pytest.mark.parametrize("step", [2, 3])
def test_failure_of_any_operation(tmp_path: Path, step: int) -> None:
    """A disk that fails at each operation in turn: an OSError, and what was there before, or the new one."""
    before, outcomes = saved(tmp_path / "before", 1, 2).folder, []
    for number in range(1, 100):
        folder = tmp_path / str(number)
        checkpoints = Checkpoints(shutil.copytree(before, folder), "mine")

        def work(folder: Path = folder, number: int = number, checkpoints: Checkpoints = checkpoints) -> None:
            count = on_disk_operation(folder, number, fail)
            try:
                save(checkpoints, step, version=1)
            except OSError as error:
                os._exit(2 if "full" in str(error) else 1)
            os._exit(3 if count() < number else 4)

        code = in_child(work)
        outcomes.append((content(checkpoints.load()), code))
        if outcomes[-1] == ((2, 0), 2):
            assert names(folder) == ["step-000000001", "step-000000002"]
        if code == 3:  # it has no more operations than those
            break
    # 4: some failures do not matter, such as that of making a folder which is there; then the new one is complete.
    assert set(outcomes) == {((2, 0), 2), ((step, 1), 2), ((step, 1), 4), ((step, 1), 3)}


def fail() -> None:
    raise OSError(errno.ENOSPC, "the disk is full")  # as a disk does: shutil adds the path to it


def save_for_ever(checkpoints: Checkpoints, acknowledge: int) -> None:
    """Each step twice, the second time in place of the first."""
    step, version = content(checkpoints.load()) or (0, 1)
    while True:
        step, version = following(step, version)
        save(checkpoints, step, version)
        os.write(acknowledge, f"{step} {version}\n".encode())


def following(step: int, version: int) -> tuple[int, int]:
    return (step, 1) if version == 0 else (step + 1, 0)


def test_kill_at_random_moments(tmp_path: Path) -> None:
    chance, checkpoints, last = random.Random(0), Checkpoints(tmp_path, "mine"), (0, 1)
    for _ in range(20):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(checkpoints, writing)
            finally:
                os._exit(1)
        os.close(writing)
        time.sleep(chance.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with os.fdopen(reading) as lines:
            told = [line.split() for line in lines]
        if told:
            last = (int(told[-1][0]), int(told[-1][1]))
        found = content(checkpoints.load()) or (0, 1)  # and without a warning
        assert found in (last, following(*last))
        last = found
    assert last[0] > 1
