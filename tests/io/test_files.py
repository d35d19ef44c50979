"""Files that are there as a whole or not at all. Kills and full disks are in `faults`."""

import errno
import os
from pathlib import Path

import pytest

from uncollapse.io import files
from uncollapse.io.files import NotWrittenError, write, write_errors

LEFT = f".{32 * 'a'}.part"


def test_what_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / LEFT).write_text("half")
    for name in (".a.part", "notes.part", f"{32 * 'a'}.part"):
        (tmp_path / name).write_text("not ours")
    write(tmp_path / "file", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.part", f"{32 * 'a'}.part", "file", "notes.part"]


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / LEFT).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        write(tmp_path / "file", "new")
        assert (tmp_path / LEFT).exists()


def test_a_part_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    lock, swept = fcntl.flock, []

    def late(file: object, how: int) -> None:
        if not swept:
            (part,) = tmp_path.glob(".*.part")
            part.unlink()
            swept.append(part)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert write(tmp_path / "file", "new").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / LEFT).write_text("half")
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse)
    assert write(tmp_path / "file", "new").read_text() == "new"
    assert (tmp_path / LEFT).exists()  # somebody may be writing it
    monkeypatch.setattr(files, "fcntl", None)  # as on Windows
    assert write(tmp_path / "file", "newer").read_text() == "newer"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, r"No space left on device\. Make room on that disk, or name a folder on another one\."),
        (errno.EROFS, r"Read-only file system\. Name a folder that can be written to\."),
        (errno.EIO, r"Input/output error\. Name another one\."),
    ],
)
def test_the_sentence_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(NotWrittenError, match=f"file.*{advice}") as caught:
        write(path, "new")
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"file": "old"}


def test_the_file_within_is_told() -> None:
    with pytest.raises(NotWrittenError, match=r"^inner.*broken"):  # noqa: SIM117
        with write_errors("outer"), write_errors("inner"):
            raise OSError("broken")
