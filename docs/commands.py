"""The command line as a page: every command with its arguments and flags, read from the program itself."""

import inspect
import re
from typing import Any

import typer

from uncollapse.cli.app import app

STYLE = re.compile(r"\[/?[a-z ]*\]")  # of rich


def commands() -> str:
    """A heading, what it does and a table for each command."""
    main = typer.main.get_command(app)
    context = typer.Context(main)
    return "\n\n".join(_told(name, main.get_command(context, name)) for name in main.list_commands(context))  # type: ignore[attr-defined]


def _told(name: str, command: Any) -> str:
    """One command. What follows a form feed in the help is not shown on the command line either."""
    words = STYLE.sub("", inspect.cleandoc(command.help or "").split("\f")[0])
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    table = "\n".join(("| | | |", "|---|---|---|", *rows)) if rows else ""
    return "\n\n".join(filter(None, (f"## uncollapse {name}", words, table)))


def _row(parameter: Any) -> str:
    flags = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []
    shown = ", ".join(f"`{flag}`" for flag in flags) or f"`{parameter.metavar or parameter.name.upper()}`"
    value = "" if getattr(parameter, "is_flag", False) or not flags else f"`{parameter.metavar or 'TEXT'}`"
    words = STYLE.sub("", getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
    return f"| {shown} | {value} | {words} |"
