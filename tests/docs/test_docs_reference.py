"""Every public name is in the reference, and its pictures and measured tables are drawn from what was measured."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import uncollapse as uc
from uncollapse.report import canvas

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^::: ([\w.]+)\n(?:    options:\n      members: \[([^\]]*)\])?", flags=re.M)


def referenced() -> dict[str, set[str] | None]:
    """Module -> the names of it that are shown; None where all are."""
    found: dict[str, set[str] | None] = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        for module, members in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            names = set(re.split(r",\s*", members)) if members else None
            known = found.get(module, set())
            found[module] = None if names is None or known is None else known | names
    return found


def test_every_public_name_is_in_the_reference() -> None:
    shown, missing = referenced(), []
    for name in (name for name in uc.__all__ if not name.isupper() and not name.startswith("__")):
        thing = getattr(uc, name)
        if not isinstance(thing, ModuleType):
            members = shown.get(thing.__module__, set())
            missing += [] if members is None or name in members else [f"{thing.__module__}.{name}"]
    assert missing == [], "give each a place: ::: module on a page"


def test_modules_of_the_reference_have_what_is_shown() -> None:
    for module, members in referenced().items():
        imported = importlib.import_module(module)
        assert [name for name in members or () if not hasattr(imported, name)] == []


@pytest.fixture
def concepts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.delitem(sys.modules, "concepts", raising=False)
    module = importlib.import_module("concepts")
    monkeypatch.setattr(module, "IMAGES", tmp_path)
    return module


def test_pictures_of_concepts_have_the_colours_of_light_and_dark_pages(concepts: ModuleType) -> None:
    pytest.importorskip("matplotlib")
    drawn = list(concepts.draw())
    names = ["spheres", "pairs", "step", "depth", "propositions"]
    assert [path.name for path in drawn] == [f"concepts_{name}.svg" for name in names]
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    for path in drawn:
        assert f"images/{path.name}" in page
        assert "prefers-color-scheme: dark" in path.read_text(encoding="utf-8")


def test_what_the_page_of_concepts_says_was_measured(concepts: ModuleType) -> None:
    states = concepts.found()["spheres"]
    cosines = {name: state["figures"]["mean_cosine"] for name, state in states.items()}
    ranks = {name: state["figures"]["effective_rank"] for name, state in states.items()}
    assert cosines["complete collapse"] > 0.9
    assert abs(cosines["dimensional collapse"] - cosines["healthy"]) < 0.05
    assert 2 < ranks["dimensional collapse"] < 2.5 < ranks["healthy"]
    verdicts = [run["verdict"] for run in concepts.found()["depth"].values()]
    assert verdicts[0] in ("complete", "both")
    assert verdicts[2] != "none"  # a weak cure only delays it
    assert verdicts[3] == "none"


def test_peers_and_losses_are_those_of_the_benchmarks(concepts: ModuleType) -> None:
    comparisons = importlib.import_module("comparisons")
    _, rows = comparisons.peers()
    assert any("lightly" in row[0] for row in rows)
    lost = comparisons.lost()[1]
    missed = [t for name in ("", "_text", "_vision", "_hypersphere") for t in comparisons.measured(name)]
    assert {t["name"].strip() for t in missed if t["reached"] is False} <= {row[0] for row in lost}


def test_dark_colours_are_those_of_the_report() -> None:
    style = (ROOT / "src/uncollapse/report/assets/report.css").read_text(encoding="utf-8")
    pairs = dict(re.findall(r"light-dark\((#\w{6}), (#\w{6})\)", style))
    own = {drawn: shown for drawn, shown in canvas.DARK.items() if drawn not in ("#000000", "#ffffff")}
    assert {drawn: pairs[drawn] for drawn in own} == own
