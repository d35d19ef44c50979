"""Flags of a recipe for the shell to complete. They are noted in the user's cache, as torch is needed to find them."""

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uncollapse import __version__
from uncollapse.cli import recipe_flags
from uncollapse.cli.completion import among
from uncollapse.io import files
from uncollapse.lab.config.fields import settings

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe

HOME = Path(__file__).parents[1]
FOLDER = "completion"  # below the user's cache


def light(name: str, recipe: "Callable[[], Recipe]", build: "Callable[[Recipe], Any]") -> Any:
    """A command that has the recipe's flags and can only be completed; from the note if there is one that holds.

    Args:
        name: of the command and the recipe, such as train-glue.
        recipe: gives it, and imports it for that.
        build: makes its real command, from which a note is made.
    """
    note, state = files.user_cache() / FOLDER / f"{name}.json", _state()
    facts = _noted(note, state)
    if facts is None:
        facts = _facts(recipe(), build)
        with suppress(OSError):  # read-only or full: it is found out again the next time
            files.write(note, json.dumps({"state": state, "flags": facts}))
    alone = typer.Typer(add_completion=False)
    alone.command(name)(_function(facts))
    return typer.main.get_command(alone)


def _state() -> list[Any]:
    """What a note depends on: the version, and when a file was changed last, in a clone that is worked on."""
    return [__version__, max(path.stat().st_mtime for path in HOME.rglob("*.py"))]


def _noted(note: Path, state: list[Any]) -> list[dict[str, Any]] | None:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
        flags: list[dict[str, Any]] = found["flags"]
        return flags if found["state"] == state and _function(flags) else None
    except (OSError, ValueError, TypeError, KeyError):  # none there, or of another kind
        return None


def _facts(recipe: "Recipe", build: "Callable[[Recipe], Any]") -> list[dict[str, Any]]:
    """Of each flag its names, its help, whether it takes no value, and what it may be."""
    choices = {name: recipe_flags.choices(setting) for name, setting in settings(recipe.config).items()}
    choices["preset"] = list(recipe.presets)
    return [
        {
            "names": ["/".join(filter(None, (opt, *param.secondary_opts[:1]))) for opt in param.opts],
            "help": param.help or "",
            "bare": param.is_flag,
            "choices": choices.get(param.name, []),
        }
        for param in build(recipe).params
        if param.name != "help"
    ]


def _function(facts: list[dict[str, Any]]) -> Any:
    """A function whose parameters are flags."""

    def run(**given: Any) -> None:
        raise NotImplementedError("It is there to be completed only.")

    parameters = []
    for number, fact in enumerate(facts):
        kind, default = (bool, False) if fact["bare"] else (str, "")
        option = typer.Option(*fact["names"], help=fact["help"], autocompletion=among(fact["choices"]))
        annotation = Annotated[kind, option]  # type: ignore[valid-type]
        only = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(f"flag_{number}", only, default=default, annotation=annotation))
    function: Any = run
    function.__signature__ = inspect.Signature(parameters)
    return function
