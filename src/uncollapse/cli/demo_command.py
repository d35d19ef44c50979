"""uncollapse demo."""

from pathlib import Path
from typing import Annotated

import typer

from uncollapse.cli.options import option


def demo(
    out: Annotated[Path, option("DIR", "Where the reports and diagnoses go.")] = Path("demo"),
) -> None:
    """Diagnose a real model, and train a deep one with and without ContraNorm; takes some minutes."""
    from uncollapse.cli import demo as demonstration

    raise typer.Exit(demonstration.main(out))
