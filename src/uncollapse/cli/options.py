"""Options as the commands declare them."""

from pathlib import Path
from typing import Annotated, Any

import typer


def option(metavar: str | None, words: str, panel: str | None = None, *names: str, **more: Any) -> Any:
    """An option that takes a value."""
    return typer.Option(*names, metavar=metavar, help=words, rich_help_panel=panel, **more)


def flag(name: str, words: str, panel: str | None = None, **more: Any) -> Any:
    """An option that is there or not; the help shows no value for it."""
    return typer.Option(name, metavar="", help=words, rich_help_panel=panel, **more)


OUTPUT = "Output"
Name = Annotated[str | None, option("NAME", "What to call it in tables and reports.", OUTPUT)]
Out = Annotated[
    Path | None, option("DIR", "Folder for diagnosis.json and report.html; one named after the model here.", OUTPUT)
]
AsJson = Annotated[
    bool, flag("--json", "Print the diagnosis as JSON and nothing else; no files without --out.", OUTPUT)
]
FailOnCollapse = Annotated[bool, flag("--fail-on-collapse", "Exit with 3 if there is a collapse.", OUTPUT)]
