"""The commands of the README and of the documentation exist, with their flags and settings."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from website import reference

from uncollapse.cli import recipe_flags
from uncollapse.cli.app import app
from uncollapse.lab.recipe import RECIPES

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = re.compile(r"^```(?:bash|sh|shell|console)?\n(.*?)^```|((?:^ {4}[^\n]+\n)+)", flags=re.M | re.S)
FENCED = re.compile(r"^```.*?^```", flags=re.M | re.S)
PLACEHOLDER = re.compile(r"…|\b(?:COMMAND|RECIPE|KIND)\b")
RUNNERS = ("torchrun", "accelerate", "python", "uncollapse", "make")
MAIN: Any = typer.main.get_command(app)


def lines(text: str) -> Iterator[str]:
    """The lines of the shell on a page, continued ones joined."""
    without = re.sub(r"^```(?:python|text|json|yaml|\{\w+\}).*?^```\n", "", text, flags=re.M | re.S)
    for found in SHELL.finditer(without):
        joined = re.sub(r"\\\n\s*", "", found[1] or found[2])
        yield from (line.strip().removeprefix("$ ") for line in joined.splitlines())


def commands(text: str) -> Iterator[list[str]]:
    """What is given to uncollapse by the shell lines of a page, by itself or by a launcher."""
    for line in lines(text):
        words = shlex.split(line, comments=True) if line.startswith(RUNNERS) else []
        if "uncollapse" in words:
            yield words[words.index("uncollapse") + 1 :]


def spans(text: str) -> list[str]:
    """What stands as code within sentences."""
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", FENCED.sub("", text))]


def found(words: list[str]) -> tuple[Any, Any, list[str]]:
    """The command, its recipe if it has one, and what is given to them; fails if a command or a flag is not there."""
    while words and words[0] in flags(MAIN):  # those that go before a command
        words = words[1:]
    if not words or PLACEHOLDER.fullmatch(words[0]):
        return MAIN, None, []
    assert words[0] in MAIN.list_commands(typer.Context(MAIN)), f"there is no uncollapse {words[0]}"
    command, recipe, rest = MAIN.get_command(typer.Context(MAIN), words[0]), None, words[1:]
    if hasattr(command, "list_commands"):
        if not rest or PLACEHOLDER.fullmatch(rest[0]):
            return command, None, []
        recipe, command = RECIPES[rest[0]], command.get_command(typer.Context(command), rest[0])
        rest = rest[1:]
    unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - flags(command)
    assert not unknown, f"uncollapse {' '.join(words)}: there is no {', '.join(unknown)}"
    assert words[0] != "sweep" or "--grid" in rest, f"uncollapse {' '.join(words)}: there is no --grid"
    return command, recipe, rest


def parsed(words: list[str]) -> None:
    """Fails if the command cannot be parsed, or if a setting of its recipe cannot be; nothing is run."""
    command, recipe, rest = found(words)
    if not rest or "--help" in rest or PLACEHOLDER.search(" ".join(rest)):
        return
    context = command.make_context(words[0], list(rest))
    if recipe is not None and words[0] == "train":
        given = context.params
        named = recipe_flags.named_settings(recipe, given.get("preset"), given.get("quick", False))
        recipe_flags.read_config(context, recipe.config, named, [], given["pairs"] or [])


def flags(command: Any) -> set[str]:
    found = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return found | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_with_their_flags_and_settings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for words in commands(text):
        parsed(words)
    for span in spans(text):
        if span.startswith("uncollapse "):
            found(shlex.split(span)[1:])


def test_commands_are_noticed() -> None:
    text = "a `uncollapse list\nmetrics` b\n\n    uncollapse train contrast \\\n        --quick  # small\n    ls\n\n"
    text += "```bash\ntorchrun --nproc-per-node 2 -m uncollapse train vit --quick\n```\n"
    assert list(commands(text)) == [["train", "contrast", "--quick"], ["train", "vit", "--quick"]]
    assert spans(text) == ["uncollapse list metrics"]
    assert sum(len(list(commands(page.read_text(encoding="utf-8")))) for page in PAGES) > 60


@pytest.mark.parametrize(
    "line",
    [
        "nothing",
        "diagnose M --nothing",
        "train contrast --nothing 1",
        "train vit --depth ten",
        "train vit --preset no",
        "sweep gcn-depth --jobs 2",
    ],
)
def test_what_is_not_there_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"no |No |ten"):
        parsed(line.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    said = [*lines(text), *spans(text)]
    for words in (line.split("#")[0].split() for line in said if line.startswith(("python ", "make "))):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= set(targets), words
        elif words[1] == "-m":
            known = words[2] == "venv" or words[2].startswith("accelerate.")  # not ours
            assert known or any((ROOT / f).exists() for f in module_files(words[2])), words
        elif words[1].endswith(".py"):
            assert (ROOT / words[1]).exists() or "/" not in words[1], words


def module_files(name: str) -> tuple[str, ...]:
    path = name.replace(".", "/")
    return f"{path}.py", f"{path}/__main__.py", f"src/{path}.py", f"src/{path}/__main__.py"


def test_the_page_of_the_command_line_has_every_command() -> None:
    told = reference.commands()
    for name in MAIN.list_commands(typer.Context(MAIN)):
        assert f"## uncollapse {name}\n" in told
    assert "| `--fail-on-collapse` |" in told
    assert "[/" not in told
    assert "| `NAME\\|FILE` |" in told
