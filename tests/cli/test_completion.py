"""What the shell completes; and that the command line answers without torch where it can."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from uncollapse.cli import options
from uncollapse.lab.recipe import RECIPES

Run = Callable[..., Result]

LINES = {
    "commands": "uncollapse ",
    "recipes": "uncollapse train ",
    "some recipes": "uncollapse train vit",
    "recipes to sweep": "uncollapse sweep g",
    "recipes to lay out": "uncollapse table c",
    "lists": "uncollapse list ",
    "flags": "uncollapse diagnose model --ran",
    "places": "uncollapse diagnose model --at attention.r",
    "types": "uncollapse diagnose model --dtype ",
    "graphs": "uncollapse diagnose model --graph c",
    "recipes to tune": "uncollapse tune gl",
    "within a recipe": "uncollapse train gcn-depth --n",
}
ALONE = """
import contextlib, io, json, os, sys
from typer.testing import CliRunner
from uncollapse.cli import app

lines, asked = json.loads(sys.argv[1]), json.loads(sys.argv[2])
answers = {}
for name, line in lines.items():
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    os.environ["_UNCOLLAPSE_COMPLETE"] = "complete_bash"
    done = CliRunner().invoke(app, [], prog_name="uncollapse")
    answers[name] = done.output.split()
del os.environ["_UNCOLLAPSE_COMPLETE"]
for arguments in asked:
    done = CliRunner().invoke(app, arguments, prog_name="uncollapse")
    answers[" ".join(arguments)] = [done.exit_code, done.output]
heavy = {"torch", "numpy", "transformers", "sklearn", "matplotlib", "pandas"}
answers["heavy"] = sorted(heavy & {name.partition(".")[0] for name in sys.modules})
print(json.dumps(answers))
"""
ASKED = [
    ["--help"],
    ["--version"],
    ["diagnose", "--help"],
    ["embeddings", "--help"],
    ["sweep", "--help"],
    ["diagnos"],
    ["diagnose", "model", "--bathces", "x"],
    ["train", "gcn-dept"],
    ["list", "metric"],
    ["table", "vitt"],
    ["--show-completion", "zsh"],
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """All of it in a process of its own."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-c", ALONE, json.dumps(LINES), json.dumps(ASKED)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=_environment(folder), timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def _environment(folder: Path) -> dict[str, str]:
    import os

    return {**os.environ, "UNCOLLAPSE_CACHE": str(folder / "cache"), "COLUMNS": "200"}


def test_nothing_of_it_needs_torch(answers: dict[str, list[str]]) -> None:
    assert answers["heavy"] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("recipes", list(RECIPES)),
        ("some recipes", ["vit-digits", "vit"]),
        ("recipes to sweep", ["gcn-depth", "glue"]),
        ("recipes to lay out", ["circle", "contrast", "calibration"]),
        ("lists", ["metrics", "cures", "losses", "backbones", "recipes", "measures"]),
        ("flags", ["--random-weights"]),
        ("places", ["attention.residual"]),
        ("types", ["float32", "float64", "bfloat16", "float16", "auto"]),
        ("graphs", ["cora", "citeseer"]),
        ("recipes to tune", ["glue"]),
        ("within a recipe", []),
    ],
)
def test_what_is_completed(answers: dict[str, list[str]], line: str, expected: list[str]) -> None:
    assert answers[line] == expected


def test_commands_and_choices_are_completed(answers: dict[str, list[str]]) -> None:
    assert {"diagnose", "train", "sweep", "doctor", "demo"} <= set(answers["commands"])


def test_usage_errors_come_with_what_was_meant(answers: dict[str, list[str]]) -> None:
    for arguments, meant in (
        ("diagnos", "'diagnose'"),
        ("diagnose model --bathces x", "--batches"),
        ("train gcn-dept", "'gcn-depth'"),
        ("list metric", "'metrics'"),
        ("table vitt", "'vit'"),
    ):
        code, words = answers[arguments]
        assert (code, meant in words) == (2, True), words
    for arguments in ("--help", "--version", "diagnose --help", "embeddings --help", "sweep --help"):
        assert answers[arguments][0] == 0


@pytest.mark.parametrize(
    ("shell", "sign"), [("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete --command")]
)
def test_the_script_for_a_shell(run: Run, shell: str, sign: str) -> None:
    result = run("--show-completion", shell)
    assert (result.exit_code, sign in result.stdout) == (0, True)


def test_the_running_shell_is_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_running_shell", lambda: "zsh")
    assert "#compdef" in run("--show-completion").stdout
    monkeypatch.setattr(options, "_running_shell", lambda: None)
    result = run("--show-completion")
    assert result.exit_code == 2
    assert "cannot be detected" in " ".join(result.stderr.split())
    result = run("--install-completion", "fsh")
    assert result.exit_code == 2
    assert "'fish'" in result.stderr


def test_it_is_installed_for_the_shell_that_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = run("--install-completion", "fish")
    assert result.exit_code == 0
    (script,) = tmp_path.rglob("*.fish")
    assert "complete --command" in script.read_text(encoding="utf-8")
