"""uncollapse list."""

from collections.abc import Callable

import pytest
from rich.console import Console
from typer.testing import Result

from uncollapse.backbones import BACKBONES
from uncollapse.cli import console
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.lab.recipe import RECIPES
from uncollapse.registry import CURES, LOSSES, METRICS

REGISTRIES = {
    "metrics": METRICS,
    "cures": CURES,
    "losses": LOSSES,
    "backbones": BACKBONES,
    "recipes": RECIPES,
    "measures": MEASURES,
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_list_shows_every_entry(run: Callable[..., Result], kind: str) -> None:
    result = run("list", kind)
    assert result.exit_code == 0
    assert len(REGISTRIES[kind]) > 1
    assert [name for name in REGISTRIES[kind] if f" {name} " not in result.stdout] == []


def test_a_wrong_kind_is_one_sentence(run: Callable[..., Result]) -> None:
    result = run("list", "layers")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: There is no list of 'layers'; choose one of {', '.join(REGISTRIES)}.\n"


def test_without_a_kind_it_says_which_there_are(run: Callable[..., Result]) -> None:
    result = run("list")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"one of {', '.join(REGISTRIES)}, such as" in result.stderr


@pytest.mark.parametrize("kind", ["cures", "recipes"])
def test_a_narrow_terminal_shows_entries_in_full(
    run: Callable[..., Result], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "stdout_console", lambda: Console(width=80, force_terminal=True, color_system=None))
    result = run("list", kind)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    assert [name for name in REGISTRIES[kind] if name not in lines] == []
