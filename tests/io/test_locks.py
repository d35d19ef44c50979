"""A file that one process holds at a time."""

import os
from pathlib import Path

from uncollapse.io.files import try_lock


def test_one_holds_it_and_it_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.lock"
    with try_lock(path) as first:
        assert first
        assert path.read_text() == f"{os.getpid()}\n"
        with try_lock(path) as second:
            assert not second
        assert path.exists()
    assert not path.exists()
    with try_lock(path) as third:
        assert third


def test_what_a_dead_process_left_can_be_taken(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text("123456789\n")
    with try_lock(path) as ours:
        assert ours
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_file_that_was_removed_before_it_was_locked_does_not_count(tmp_path: Path, monkeypatch) -> None:
    """Between opening and locking, its holder ends and another process takes a new file of this name."""
    import fcntl

    path, lock, others = tmp_path / "run.lock", fcntl.flock, []

    def slow(handle: int, how: int) -> None:
        if not others:
            path.unlink()
            others.append(path.open("w"))
            lock(others[0], how)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with try_lock(path) as ours:
        assert not ours
    assert path.exists()
    others[0].close()
