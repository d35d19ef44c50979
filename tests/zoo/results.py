"""The file of results, results/zoo.json: one row per architecture, written after each."""

import json
import re
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

from uncollapse.io import files

LIBRARIES = (
    *("uncollapse", "torch", "transformers", "timm", "torchvision", "torch_geometric", "sentence-transformers"),
    "open_clip_torch",
)
NOT_BUILT = "not_built"
STEPS = ("works", "named", "refused", "failed", "silent")  # from best to worst


def describe(error: BaseException, length: int = 300) -> str:
    """Return an error in words, without the folders of the machine that it came up on.

    >>> describe(ValueError("from '/home/me/lib/site-packages/timm/x.py'"))
    "ValueError: from 'timm/x.py'"
    """
    return re.sub(r"/[^\s'\"]*/site-packages/", "", f"{type(error).__name__}: {error}")[:length]


def installed() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    return {name: distribution(name).version for name in LIBRARIES if list(distributions(name=name))}


class ZooFile:
    """Rows by name, in a file that is replaced whole after each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "versions": {}}
        self.rows: dict[str, dict[str, Any]] = {row["name"]: row for row in stored["rows"]}
        self.versions: dict[str, str] = stored["versions"]  # of libraries that are not installed here

    def add(self, row: dict[str, Any]) -> None:
        """Add or replace a row with the time of now, and write the file."""
        self.rows[row["name"]] = row | {"ran": datetime.now(UTC).isoformat(timespec="minutes")}
        document = {
            "command": "python -m tests.zoo",
            "seed": 0,
            "versions": self.versions | installed(),
            "rows": [self.rows[name] for name in sorted(self.rows)],
        }
        files.write(self.path, json.dumps(document, indent=1) + "\n")

    def status(self, name: str) -> str:
        """Return the worst status of the steps of a row; "" if there is no such row."""
        row = self.rows.get(name)
        return "" if row is None else worst(row)

    def ran(self, name: str) -> str:
        """Return when a row was run, "" if there is none or it does not say; later times sort after earlier ones."""
        return str(self.rows.get(name, {}).get("ran", ""))

    def summary(self) -> str:
        """Return how many rows have each status."""
        counts = Counter(worst(row) for row in self.rows.values())
        return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def worst(row: dict[str, Any]) -> str:
    """Return the status of a row: that of its diagnosis, or "silent" if any of its steps is."""
    if NOT_BUILT in row:
        return NOT_BUILT
    steps = [row["diagnose"], *(row.get(name, {}) for name in ("attach", "gradient", "overhead"))]
    steps += row.get("places", {}).values()
    statuses = [step.get("status", "works") for step in steps]
    return next((s for s in ("silent", "failed") if s in statuses), str(row["diagnose"]["status"]))
