"""The clock of a training, with a clock that is set by hand."""

from collections.abc import Callable

import pytest

from uncollapse.lab.engine.loop import RECENT, Throughput


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def passes(self, seconds: float) -> Callable[[], float]:
        """Something that takes so long."""

        def wait() -> float:
            self.seconds += seconds
            return seconds

        return wait


def step(pace: Throughput, clock: Clock, waiting: float, work: float, *sizes: int) -> None:
    assert pace.time_fetch(clock.passes(waiting)) == waiting
    clock.passes(work)()
    pace.end_step([range(size) for size in sizes])


def test_speed_and_the_share_of_waiting() -> None:
    clock = Clock()
    pace = Throughput("images", clock)
    step(pace, clock, 1.0, 3.0, 8, 8)
    step(pace, clock, 0.5, 1.5, 4)
    assert pace.summary() == {"images_per_second": 20 / 6, "waiting": 1.5 / 6}


def test_what_comes_between_two_steps_counts_nowhere() -> None:
    clock = Clock()
    pace = Throughput("images", clock)
    for _ in range(3):
        step(pace, clock, 1.0, 1.0, 10)
        clock.passes(500.0)()  # an evaluation
    assert pace.summary() == {"images_per_second": 5.0, "waiting": 0.5}
    assert pace.current() == {"images/s": 5.0}


def test_the_fetch_that_finds_the_end_is_waiting_as_well() -> None:
    clock = Clock()
    pace = Throughput("images", clock)
    step(pace, clock, 0.0, 1.0, 10)
    pace.time_fetch(clock.passes(1.0))  # and nothing came
    assert pace.summary() == {"images_per_second": 5.0, "waiting": 0.5}


def test_the_speed_of_the_moment_is_that_of_the_last_steps() -> None:
    clock = Clock()
    pace = Throughput("images", clock)
    step(pace, clock, 0.0, 100.0, 10)
    assert pace.current() == {}
    step(pace, clock, 0.0, 1.0, 10)
    assert pace.current() == {"images/s": 10.0}  # without the first step, which warmed up
    for _ in range(RECENT):
        step(pace, clock, 0.0, 2.0, 10)
    assert pace.current() == {"images/s": 5.0}
    assert pace.summary()["images_per_second"] == pytest.approx(10 * (RECENT + 2) / (101 + 2 * RECENT))


@pytest.mark.parametrize("sizes", [(0,), ()])
def test_steps_of_nothing_have_no_speed(sizes: tuple[int, ...]) -> None:
    clock = Clock()
    pace = Throughput("images", clock)
    step(pace, clock, 1.0, 1.0, *sizes)
    assert pace.summary() == {}


def test_a_clock_that_does_not_move_divides_by_nothing() -> None:
    pace = Throughput("images", Clock())
    for _ in range(3):
        pace.time_fetch(lambda: None)
        pace.end_step([range(4)])
    assert pace.summary() == {}
    assert pace.current()["images/s"] > 0


def test_batches_need_a_length_only_where_they_are_counted() -> None:
    clock = Clock()
    pace = Throughput(None, clock)
    for _ in range(3):
        pace.time_fetch(clock.passes(1.0))
        pace.end_step([object()])
    assert (pace.current(), pace.summary()) == ({}, {})
