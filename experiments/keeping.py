"""How the demonstrations keep what they found."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError
from uncollapse.io import files
from uncollapse.lab.runs.results import build_record

LIBRARIES = ("transformers", "tokenizers", "accelerate", "scikit-learn", "scipy")


def keep(out: Path, name: str, config: Any, seconds: float, *, arguments: str, **figures: Any) -> None:
    """Write the record of a demonstration, with the command that repeats it."""
    command = f"python -m experiments.{name} {arguments}"
    kept = build_record(f"experiments.{name}", config, seconds, LIBRARIES, command=command, **figures)
    files.write(out, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def told_plainly() -> Iterator[None]:
    """What was given and does not fit ends a demonstration with a sentence."""
    try:
        yield
    except UsageError as error:
        raise SystemExit(str(error)) from error


def parser(text: str | None, name: str) -> argparse.ArgumentParser:
    """Arguments that all demonstrations take."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path(f"results/text/{name}.json"), help="where the result is kept")
    return made
