"""Reading ahead in a thread."""

import threading
from collections.abc import Iterator

import pytest

from uncollapse.io.embedding_rows import prefetch


def test_items_come_in_order_and_no_more_than_asked_wait() -> None:
    made: list[int] = []
    gate = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            if number == 4:
                gate.set()
            yield number

    taken = prefetch(numbers(), ahead=3)
    assert next(taken) == 0
    assert gate.wait(10)  # made although nobody asked: three wait, and one is in hand
    assert len(made) <= 6
    assert list(taken) == list(range(1, 50))


def test_an_error_comes_where_the_items_are_taken() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    taken = prefetch(numbers())
    assert next(taken) == 1
    with pytest.raises(OSError, match="gone"):
        next(taken)


def test_whoever_stops_taking_ends_the_thread() -> None:
    before = threading.active_count()
    taken = prefetch(range(10**9))
    assert next(taken) == 0
    taken.close()
    assert threading.active_count() <= before  # one that another test left may end as well
