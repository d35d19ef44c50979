"""Tables of the pages on alternatives and limits: what was measured beside others, won and lost, from results/."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from website.pages.results import RESULTS, Row

LIBRARIES = ("lightly", "pytorch-metric-learning", "the authors' pdist", "a cross entropy")
DENSE, OURS = "the published dense form", "ContraNorm in every block"
GROUPS = tuple(sorted(file.stem.removeprefix("benchmarks") for file in RESULTS.glob("benchmarks*.json")))
DEAR = 1.3  # times the step without anything: beyond this a cost is listed as high


def measured(name: str) -> list[dict[str, Any]]:
    """What a file of benchmarks holds; nothing if it was not run."""
    file = RESULTS / f"benchmarks{name}.json"
    return list(json.loads(file.read_text(encoding="utf-8"))["targets"]) if file.exists() else []


def _named(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each target of a file with its full name: an indented one is a variant of the one above it."""
    above = ""
    for target in measured(name):
        own = target["name"].strip()
        if target["name"].startswith(" "):
            yield f"{above}; {own}", target
        else:
            above = own
            yield own, target


def peers() -> tuple[Row, Sequence[Row]]:
    """The losses beside those of other libraries: time, and memory where it was measured."""
    rows, found = [], measured("_hypersphere")
    for target, below in zip(found, [*found[1:], {"name": ""}], strict=True):
        if any(library in target["name"] for library in LIBRARIES):
            memory = f"{below['measured']:.2f}" if below["name"].strip() == "its memory" else ""
            rows.append((target["name"], f"{target['measured']:.1f}", memory, target["detail"]))
    return ("forward and backward, one thread", "× as fast", "× the memory", "time"), rows


def other_peers() -> tuple[Row, Sequence[Row]]:
    """Other work beside that of other libraries, also where theirs is faster."""
    rows = [(whole, f"{t['measured']:.{2 if t['measured'] < 1 else 1}f}", t["detail"]) for whole, t in _named("_peers")]
    return ("computation, other library", "× as fast", "time"), rows


def lost() -> tuple[Row, Sequence[Row]]:
    """Targets that were missed, dense forms that were faster, and what is dear."""
    return ("", "measured", "reason"), [*_missed(), *_faster_dense(), *_dear()]


def _missed() -> Iterator[Row]:
    for name in GROUPS:
        for whole, t in _named(name):
            if t["reached"] is False:
                yield whole, f"{t['measured']:.2f} {t['unit']}", f"our target was {t['target']}"


def _faster_dense() -> Iterator[Row]:
    ours: dict[str, Any] = {}
    for t in measured("_attach"):
        if t["name"].startswith(OURS):
            ours = t
        elif t["name"].strip().startswith(DENSE) and t["measured"] < ours["measured"]:
            figures = f"{ours['measured']:.2f} × the time of a step without it"
            yield ours["name"], figures, f"the published dense form takes {t['measured']:.2f} ×, but sees padding"


def _dear() -> Iterator[Row]:
    for name in ("_diagnose", "_text", "_vision"):
        for whole, t in _named(name):
            if t["unit"] == "× the time" and t["measured"] > DEAR and t["reached"] is not False:  # not listed yet
                yield whole, f"{t['measured']:.2f} × the time", f"more than {DEAR} × the time"


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "peers": peers,
    "other_peers": other_peers,
    "lost": lost,
}
