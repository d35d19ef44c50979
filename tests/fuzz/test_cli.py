"""Command lines of all kinds: each is done, or refused with a sentence and exit code 2; nothing else ever happens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import uncollapse as uc
from uncollapse.cli.app import app
from uncollapse.io import files

from .damage import TEXTS, few

DONE, REFUSED, COLLAPSED = 0, 2, 3
MODELS = """
import torch
from torch import nn

def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

def batches():
    return [torch.randn(4, 6, 8)]

def broken():
    raise RuntimeError("the builder broke")
"""
VALUES = [
    *(text for text in TEXTS if not text.startswith("/")),
    "/dev/null/x",  # what is written where a flag says must not hit this machine
    "nan",
    "inf",
    "-1",
    "0",
    "1",
    "1e999",
    "9" * 400,
    "-",
    "--",
    "x.json",
    "x.npy",
    "x.txt",
    "missing.json",
    ".",
]
VALUES += [
    "models.py:encoder",
    "models.py:batches",
    "models.py:missing",
    "nowhere:f",
    "timm:none",
    "karate",
    "cpu",
    "auto",
    "=",
    "a=b",
]
WORDS = st.sampled_from(VALUES) | st.text(max_size=6).filter(lambda word: not word.startswith(("/", "~")))
COMMANDS: Any = typer.main.get_command(app)
GROUPS = {verb: COMMANDS.get_command(None, verb).list_commands(None) for verb in ("train", "tune")}
SAFE = {
    "diagnose": (),
    "compare": (),
    "embeddings": (),
    "list": (),
    "table": (),
    "sweep": ("--dry-run",),
}  # behind the name, where no flag takes it for its value


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in a folder that has a few files, without a network; nothing is written beyond the test's own."""
    folder = tmp_path / "a" / "b" / "c"  # so deep that ../../x is the test's own too
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(MODELS, encoding="utf-8")
    (folder / "x.txt").write_text("one text\nanother text\n", encoding="utf-8")
    numpy.save(folder / "x.npy", numpy.random.default_rng(0).normal(size=(50, 6)).astype("float32"))
    uc.diagnose_activations([torch.randn(4, 6, 8)]).save(folder / "x.json")
    real = files._new_part

    def within(place: Path) -> Any:
        assert place.resolve().is_relative_to(tmp_path), place
        return real(place)

    monkeypatch.setattr(files, "_new_part", within)
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return lambda *words: CliRunner().invoke(app, list(words), input="a text\nanother\n")


def check(result: Result, words: list[str]) -> None:
    """It is done, or says what is wrong."""
    said = f"{words}: exit {result.exit_code}\n{result.output[-2000:]}"
    assert result.exception is None or isinstance(result.exception, SystemExit), f"{result.exception!r} of {said}"
    assert result.exit_code in (DONE, REFUSED, COLLAPSED), said
    assert "Traceback" not in result.output, said
    assert "\x1b[2J" not in result.output or any("\x1b[2J" in word for word in words), said  # none that nobody typed
    if result.exit_code == REFUSED:
        assert "Error" in result.stderr or "Usage" in result.stderr, said


def flags(command: Any) -> list[str]:
    """The flags of a command, but for those that show tracebacks or help."""
    return [
        flag
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("--")
    ]


@st.composite
def line(draw: st.DrawFn, flags: list[str]) -> list[str]:
    """Flags with and without values in any order, between words."""
    found: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.integers(0, 4))
        if kind < 3:
            found += [draw(st.sampled_from(flags)), *([draw(WORDS)] if kind else [])]
        else:
            found.append(draw(WORDS) if kind == 3 else f"{draw(st.sampled_from(flags))}={draw(WORDS)}")
    return found


@pytest.mark.parametrize("name", SAFE)
def test_wild_lines(run: Callable[..., Result], name: str) -> None:
    starts = {
        "diagnose": ["models.py:encoder", "--batches", "models.py:batches", "--no-baseline"],
        "compare": ["x.json", "x.json"],
    }
    starts |= {"embeddings": ["x.npy", "--draws", "40"], "list": ["cures"], "table": ["gcn-depth"]}
    starts |= {"sweep": ["gcn-depth", "--grid", "layers=2,4"]}

    @few(60)
    @given(line(flags(COMMANDS.get_command(None, name)) or ["--x"]), st.booleans())
    def lines(words: list[str], whole: bool) -> None:
        words = [name, *SAFE[name], *(starts[name] if whole else ()), *words]
        if "--help" not in words:
            check(run(*words), words)

    lines()


@pytest.mark.parametrize(("verb", "recipe"), [(verb, recipe) for verb in ("train", "tune") for recipe in GROUPS[verb]])
def test_wild_settings_of_a_recipe(run: Callable[..., Result], verb: str, recipe: str) -> None:
    names = flags(COMMANDS.get_command(None, verb).get_command(None, recipe))
    assert "--dry-run" in names

    @few(15)
    @given(line(names))
    def lines(words: list[str]) -> None:
        words = [verb, recipe, "--dry-run", *words]
        if "--help" not in words:
            check(run(*words), words)

    lines()


@few(60)
@given(words=st.lists(WORDS | st.sampled_from(["--version", "--no", "-x", "train", "list"]), max_size=3))
def test_anything_behind_the_name(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (DONE, REFUSED), f"{words}: {result.output[-500:]}"
    assert isinstance(result.exception, SystemExit | None), words


@pytest.mark.parametrize("name", sorted(COMMANDS.list_commands(None)))
def test_every_command_refuses_an_unknown_flag(run: Callable[..., Result], name: str) -> None:
    result = run(name, "--no-such-flag")
    assert result.exit_code == REFUSED
    assert "no-such-flag" in result.output


@few(60)
@given(name=st.sampled_from(TEXTS) | st.text(max_size=300))
def test_files_stay_in_the_folder_whatever_a_model_is_called(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    from uncollapse.cli.console import output_folder

    place = output_folder(None, name, as_json=False)
    assert place is not None
    assert place.name == str(place)
    assert len(place.name.encode()) < 200
    (tmp_path_factory.getbasetemp() / place).exists()


def test_a_diagnosis_with_a_wild_name_is_compared(run: Callable[..., Result]) -> None:
    state = json.loads(Path("x.json").read_text(encoding="utf-8"))
    for name in TEXTS:
        Path("y.json").write_text(json.dumps(state | {"model": name}), encoding="utf-8")
        check(run("compare", "x.json", "y.json", "--out", "c.html"), [])
