"""Arguments, errors and records that the experiments in this folder share."""

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


def save_record(out: Path, name: str, config: Any, seconds: float, *, arguments: str, **figures: Any) -> None:
    """Write the record of an experiment, with the command that repeats it."""
    command = f"python -m experiments.{name} {arguments}"
    record = build_record(f"experiments.{name}", config, seconds, LIBRARIES, command=command, **figures)
    files.write(out, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def plain_errors() -> Iterator[None]:
    """End an experiment with a sentence, not a traceback, where what was given does not fit."""
    try:
        yield
    except UsageError as error:
        raise SystemExit(str(error)) from error


def parser(text: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all experiments take."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path(f"results/text/{name}.json"), help="file of the result")
    return made
