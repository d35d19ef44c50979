"""Tables of the models that were tried, from results/zoo.json."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from website.pages.results import RESULTS, Row

WORDS = {
    "works": "by itself",
    "named": "after naming",
    "refused": "no, and it says why",
    "failed": "no, timed out",
    "silent": "WRONG",
}
GUESS = "taken from the modules"


@cache
def document() -> dict[str, Any]:
    """The file of results; no rows before it was run."""
    file = RESULTS / "zoo.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "versions": {}}


def rows() -> list[dict[str, Any]]:
    """Architectures that were built."""
    return [row for row in document()["rows"] if "not_built" not in row]


def summary() -> tuple[Row, Sequence[Row]]:
    """How many architectures of each library work."""
    head = ("library", "architectures", "diagnosed", "after naming", "not diagnosed", "cured", "silently wrong")
    found = [_summary(library, [r for r in rows() if _library(r) == library]) for library in _libraries()]
    return head, [*found, _summary("all", rows())] if found else []


def _libraries() -> list[str]:
    return list(dict.fromkeys(map(_library, rows())))


def _library(row: dict[str, Any]) -> str:
    return str(row["name"]).partition("/")[0]


def _summary(name: str, own: list[dict[str, Any]]) -> Row:
    counts = Counter(row["diagnose"]["status"] for row in own)
    cured = sum(any(place["status"] == "works" for place in row.get("places", {}).values()) for row in own)
    silent = sum("silent" in _statuses(row) for row in own)
    share = f"{counts['works']} ({counts['works'] / max(1, len(own)):.0%})"
    others = len(own) - counts["works"] - counts["named"]
    return name, str(len(own)), share, str(counts["named"]), str(others), str(cured), str(silent)


def _statuses(row: dict[str, Any]) -> list[str]:
    steps = [row["diagnose"], row.get("gradient", {}), *row.get("places", {}).values()]
    return [step.get("status", "works") for step in steps]


def architectures() -> tuple[Row, Sequence[Row]]:
    """Every architecture: how its layers are found, where a cure goes, what has to be named."""
    head = ("architecture", "class", "diagnosis", "layers from", "places of a cure", "to name", "run")
    return head, [_architecture(row) for row in rows()]


def _architecture(row: dict[str, Any]) -> Row:
    diagnose, places = row["diagnose"], row.get("places", {})
    works = [name for name, place in places.items() if place["status"] == "works"]
    remarks = " ".join(diagnose.get("remarks", ()))
    parts = " in parts" if "one part of the model" in remarks else ""
    source = "the modules" if GUESS in remarks else "–" if "layers" not in diagnose else "a known backbone"
    needs = "; ".join(filter(None, (diagnose.get("needs"), _of_attach(row))))
    said = WORDS[diagnose["status"]] + parts
    kind = f"`{row['class']}`" if "class" in row else "–"
    ran = row.get("ran") or f"before {row.get('ran_before', '–')}"
    return f"`{row['name']}`", kind, said, source, f"{len(works)} of {len(places)}", needs or "nothing", ran


def _of_attach(row: dict[str, Any]) -> str:
    needs = row.get("attach", {}).get("needs")
    return f"for a cure: `{needs}`" if needs else ""


def not_built() -> tuple[Row, Sequence[Row]]:
    """Architectures that could not be built small, and why."""
    left_out = [row for row in document()["rows"] if "not_built" in row]
    return ("architecture", "why"), [(f"`{r['name']}`", _plain(r["not_built"])) for r in left_out]


def _plain(message: str) -> str:
    """Return the beginning of a message on one line, without what Markdown would read."""
    first = " ".join(message.split())[:140]
    return "`" + first.replace("`", "'").replace("|", "/") + "`"


def cost() -> str:
    """What a cure costs in these tiny models, and with which versions all of this was run."""
    factors = [row["overhead"]["factor"] for row in rows() if "factor" in row.get("overhead", {})]
    if not factors:
        return "*Not run yet.*"
    versions = ", ".join(f"{name} {value}" for name, value in document()["versions"].items())
    return (
        f"A pass with ContraNorm in every block took {statistics.median(factors):.1f} times as long as one without "
        f"(the median over {len(factors)} of these tiny models; real ones are in [What it costs](costs.md)). "
        f"Run with {versions}, seed {document()['seed']}, by `make zoo`. {_when()}"
    )


def _when() -> str:
    """Return in which time the rows were run; `ran_before` is when a row of unknown time was first stored."""
    every = document()["rows"]
    dated = sorted(row["ran"] for row in every if "ran" in row)
    older = sorted(row["ran_before"] for row in every if "ran_before" in row)
    rest = f"; the other {len(older)} before {older[-1]}" if older else ""
    return f"{len(dated)} of {len(every)} rows were run from {dated[0]} to {dated[-1]}{rest}." if dated else ""


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "zoo_summary": summary,
    "zoo_architectures": architectures,
    "zoo_not_built": not_built,
}
TEXTS: dict[str, Callable[[], str]] = {"zoo_cost": cost}
