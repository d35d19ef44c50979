"""Tables of the reference pages, read from the registries and from the command line itself."""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import typer

import uncollapse
from uncollapse.backbones import BACKBONES
from uncollapse.cli.app import app
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.registry import CURES, LOSSES, METRICS

STYLE = re.compile(r"\[/?[a-z ]*\]")  # of rich


def metrics() -> str:
    """Name, needs, direction, bounds and paper of each metric."""
    rows = (
        (f"`{m.name}`", ", ".join(m.needs), m.better or "neither", _bounds(m.bounds), m.paper) for m in METRICS.values()
    )
    return table(("metric", "needs", "further from collapse", "bounds", "paper"), rows)


def cures() -> str:
    """Name, default place, use, cost, options and paper of each cure."""
    rows = ((f"`{c.name}`", c.default_places(), c.use, c.cost, _code(c.options()), c.paper) for c in CURES.values())
    return table(("cure", "place", "for", "cost", "options when attached", "paper"), rows)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def losses() -> str:
    """Name, needs and paper of each loss."""
    return table(("loss", "needs", "paper"), ((f"`{x.name}`", ", ".join(x.needs), x.paper) for x in LOSSES.values()))


def presets() -> str:
    """Arguments of each preset of ContraNorm."""
    rows = (
        (f"`{name}`", ", ".join(f"`{key}={value!r}`" for key, value in options.items()))
        for name, options in uncollapse.ContraNorm.PRESETS.items()
    )
    return table(("preset", "arguments that differ from `contra_norm`'s and `ContraNorm`'s defaults"), rows)


def measures() -> str:
    """Name, scope, direction and meaning of each measure of a diagnosis."""
    rows = ((f"`{m.name}`", m.scope, m.better or "neither", m.says) for m in MEASURES.values())
    return table(("measure", "of", "further from collapse", "what it says"), rows)


def backbones() -> str:
    """The families of models that are known."""
    return table(("backbone", "library", "models"), ((b.name, b.library, b.models) for b in BACKBONES.values()))


def commands() -> str:
    """A heading, what it does and a table for each command."""
    main = typer.main.get_command(app)
    context = typer.Context(main)
    return "\n\n".join(_told(name, main.get_command(context, name)) for name in main.list_commands(context))  # type: ignore[attr-defined]


def _told(name: str, command: Any) -> str:
    """One command. What follows a form feed in the help is not shown on the command line either."""
    words = STYLE.sub("", inspect.cleandoc(command.help or "").split("\f")[0])
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    return "\n\n".join(filter(None, (f"## uncollapse {name}", words, table(("", "", ""), rows) if rows else "")))


def _row(parameter: Any) -> tuple[str, str, str]:
    flags = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []
    shown = ", ".join(f"`{flag}`" for flag in flags) or f"`{parameter.metavar or parameter.name.upper()}`"
    value = "" if getattr(parameter, "is_flag", False) or not flags else f"`{parameter.metavar or 'TEXT'}`"
    return shown, value, STYLE.sub("", getattr(parameter, "help", None) or "").replace("\n", " ")


def _bounds(bounds: tuple[float | None, float | None]) -> str:
    low, high = bounds
    return f"{'−∞' if low is None else low:} … {'∞' if high is None else high}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


TEXTS: dict[str, Callable[[], str]] = {
    "metrics": metrics,
    "cures": cures,
    "losses": losses,
    "presets": presets,
    "measures": measures,
    "backbones": backbones,
    "commands": commands,
}
