"""The bar for what takes longer than a second."""

import io
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from uncollapse.cli import progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr is a terminal from here on; no fixture, since pytest sets stderr again before the test."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def plain(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_bar_comes_with_what_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    with progress.ProgressBar() as bar:
        done = bar.stage("Measuring [x]", total=4)
        done(3)
        bar.note("A note [bold].")
        time.sleep(0.4)
    assert "Measuring [x]" in plain(terminal)
    assert "75%" in plain(terminal)
    assert "A note [bold]." in plain(terminal)


@pytest.mark.parametrize("bar", [progress.ProgressBar, progress.sweep_progress])
def test_notes_above_a_bar_are_wrapped_between_words(monkeypatch: pytest.MonkeyPatch, bar: Callable[[], Any]) -> None:
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")
    bar().note("The sentences of a long note, and a_path_that_is_longer_than_the_terminal.")
    lines = plain(terminal).splitlines()
    assert lines == ["The sentences of a long note,", "and", "a_path_that_is_longer_than_the_terminal."]


@pytest.mark.parametrize("bar", [progress.ProgressBar, progress.sweep_progress])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_notes_do_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, bar: Callable[[], Any], is_terminal: bool
) -> None:
    stream = at_terminal(monkeypatch)
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    bar().note("Skipped: broken\x1b[2J.png")
    assert plain(stream) == "Skipped: broken\\x1b[2J.png\n"


def test_a_training_has_its_figures_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    with progress.ProgressBar() as bar:
        done = bar.start_training("Seed 0")
        done(150, 200, {"epoch": 150, "loss": 0.51234})
        done(151, 200, {"epoch": 151, "loss": 0.41234, "validation": 0.7654, "validation_loss": 1.0})
        time.sleep(0.4)
    shown = plain(terminal)
    assert "Seed 0" in shown
    assert "76%" in shown
    assert "epoch 151  loss 0.412  validation 0.765" in shown
    assert "validation_loss" not in shown


def test_speed_and_time_left_stand_on_a_narrow_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    with progress.ProgressBar() as bar:
        done = bar.start_training("Seed 0")
        for steps in (1, 2, 3):
            done(steps, 4, {"epoch": 299, "loss": 0.512, "images/s": 1286.2, "validation": 0.512})
        time.sleep(0.4)
    shown = plain(terminal)
    assert re.search(r"75% [-\d]:[-\d]{2}:[-\d]{2} epoch 299  loss 0.512  validation 0.512  1,286 images/s", shown)


def test_stages_stand_before_and_behind_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    with progress.ProgressBar() as bar:
        done, doing = bar.start_training("Seed 0"), bar.substage("Seed 0")
        doing("reading")
        time.sleep(0.3)
        assert "Seed 0: reading" in plain(terminal)
        done(3, 4, {})
        time.sleep(0.3)
        assert re.search(r"Seed 0 ━.* 75%", plain(terminal))
        before = len(plain(terminal))
        doing("judging")
        time.sleep(0.3)
    after = plain(terminal)[before:]
    assert "Seed 0: judging" in after
    assert "%" not in after.partition("Seed 0: judging")[2]  # it has no steps


def test_nothing_is_shown_for_what_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    with progress.ProgressBar() as bar:
        bar.stage("Measuring", total=4)(4)
    assert terminal.getvalue() == ""


def test_nothing_but_notes_is_shown_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    with progress.ProgressBar() as bar:
        bar.stage("Measuring", total=4)(1)
        bar.note("A note.")
        time.sleep(0.1)
    assert capsys.readouterr().err == "A note.\n"


def test_streams_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    at_terminal(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    before = sys.stdout, sys.stderr
    with progress.ProgressBar():
        time.sleep(0.1)
    assert (sys.stdout, sys.stderr) == before
