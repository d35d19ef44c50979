"""Errors in one sentence, exit codes, warnings."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from uncollapse import __version__
from uncollapse.cli import console, demo
from uncollapse.errors import UsageError

Run = Callable[..., Result]


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"uncollapse {__version__}\n")


def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    assert run("mend").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ValueError("It broke\n  in two."), 1, "It broke in two. (--debug shows the traceback.)"),
        (KeyError("No such name."), 1, "No such name. (--debug shows the traceback.)"),
        (RuntimeError(), 1, "RuntimeError (--debug shows the traceback.)"),
        (ExceptionGroup("Two.", [ValueError("It broke.")]), 1, "Two. (1 sub-exception) (--debug shows the traceback.)"),
        (UsageError("There is no file x."), 2, "There is no file x."),
    ],
)
def test_an_error_is_one_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, sentence: str
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)
    result = run("demo")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"Error: {sentence}\n")
    for place in (["--debug", "demo"], ["demo", "--debug"]):
        assert run(*place).exception is error


def test_interruption_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupt)
    result = run("demo")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


def test_sentences_are_wrapped_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "There is no file of this long name; name another one, or a folder that has one: see a/long/path-to/it."
    console.print_note(words)
    assert capsys.readouterr().err == f"{words}\n"
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console.print_note(words)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == words
    assert len(lines) >= 3
    assert max(map(len, lines)) <= 40


def test_demo_gets_its_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(demo, "run_demo", lambda out, quiet: seen.append(out))
    assert run("demo").exit_code == 0
    assert run("demo", "--out", "there").exit_code == 0
    assert seen == [Path("demo"), Path("there")]


def test_warnings_of_other_libraries_are_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: object, **__: object) -> int:
        warnings.warn_explicit("theirs", UserWarning, "/lib/site-packages/other/file.py", 1)
        warnings.warn_explicit("a user's\nown", UserWarning, "model.py", 1)
        return 0

    monkeypatch.setattr(demo, "run_demo", warn)
    assert run("demo").stderr == "Note: a user's own\n"


def test_ctrl_c_ends_a_measurement_cleanly(run: Run, tmp_path: Path) -> None:
    script = (tmp_path / "models.py").read_text(encoding="utf-8")
    started = tmp_path / "started"
    (tmp_path / "slow.py").write_text(
        script.replace("    while True:", f"    open({str(started)!r}, 'w').close()\n    while True:"), encoding="utf-8"
    )
    command = [sys.executable, "-c", "from uncollapse.cli import app; app()", "diagnose", "slow.py:encoder"]
    process = subprocess.Popen(
        [*command, "--batches", "slow.py:endless", "--out", "result"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not started.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()  # else one that goes on would do so for ever
    assert (process.returncode, stdout, stderr) == (130, "", "Interrupted.\n")
    assert not (tmp_path / "result").exists()
