"""The machine that runs commands with faults, and how many cases there were."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .machine import Machine


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    pytest.importorskip("accelerate")
    pytest.importorskip("torch_geometric")
    made = Machine(tmp_path_factory.mktemp("machine"))
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tests tell with `record_property("cases", number)` how many cases they had."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, number in report.user_properties:
            if name == "cases":
                kind = Path(report.nodeid.partition("::")[0]).stem
                counts[kind] = counts.get(kind, 0) + number
    if counts:
        words = ", ".join(f"{number} {kind.removeprefix('test_').replace('_', ' ')}" for kind, number in counts.items())
        terminalreporter.write_line(f"{sum(counts.values())} faults survived: {words}")
