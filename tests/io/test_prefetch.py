"""Reading ahead in a thread, and how fast a plain read is."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from uncollapse.io.prefetch import ahead, plain_read


def test_items_come_in_order_and_no_more_than_asked_wait() -> None:
    made: list[int] = []
    gate = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            if number == 4:
                gate.set()
            yield number

    taken = ahead(numbers(), most=3)
    assert next(taken) == 0
    assert gate.wait(10)  # made although nobody asked: three wait, and one is in hand
    assert len(made) <= 6
    assert list(taken) == list(range(1, 50))


def test_an_error_comes_where_the_items_are_taken() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    taken = ahead(numbers())
    assert next(taken) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


def test_whoever_stops_taking_ends_the_thread() -> None:
    before = threading.active_count()
    taken = ahead(range(10**9))
    assert next(taken) == 0
    taken.close()
    assert threading.active_count() <= before  # one that another test left may end as well


def test_a_plain_read_takes_the_end_of_the_files_up_to_a_limit(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_bytes(os.urandom(300_000))
    whole = plain_read(paths)
    assert (whole.size, whole.seconds > 0) == (900_000, True)
    assert plain_read(paths, most=400_000).size == 400_000
    assert plain_read(paths, patience=0.0).size == 0
    assert whole.held is None or 0 <= whole.held <= 1
    (tmp_path / "empty").touch()
    assert plain_read([tmp_path / "empty"]).size == 0
    assert whole.words.startswith("from ")
