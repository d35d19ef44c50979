"""Every public name is in the reference, and its pictures and measured tables are drawn from what was measured."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from website import render
from website.pages import comparisons
from website.pages import concepts as concepts_page

import uncollapse as uc
from uncollapse.report import canvas

ROOT = Path(__file__).parents[2]


def referenced() -> set[str]:
    """Names below `uncollapse` whose docstrings are on some page."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    return {name for names in render.API.findall(text) for name in re.split(r"[\s,]+", names)}


def test_every_public_name_is_in_the_reference() -> None:
    named = (name for name in uc.__all__ if not name.isupper() and not name.startswith("__"))
    public = {name for name in named if not isinstance(getattr(uc, name), ModuleType)}
    assert public - referenced() == set(), "give each a place: <!-- api: NAME --> on a page"


def test_names_of_the_reference_become_directives() -> None:
    assert all("autofunction" in (d := render.directive(name)) or "autoclass" in d for name in referenced())
    assert render.fill("<!-- api: mean_cosine,\nContraNorm -->", "a.md").split("\n\n") == [
        "```{eval-rst}\n.. autofunction:: uncollapse.mean_cosine\n```",
        "```{eval-rst}\n.. autoclass:: uncollapse.ContraNorm\n   :members:\n```",
    ]
    with pytest.raises(AttributeError, match="nothing"):
        render.fill("<!-- api: nothing -->", "a.md")


@pytest.fixture
def concepts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(concepts_page, "IMAGES", tmp_path)
    return concepts_page


def test_pictures_of_concepts_have_the_colors_of_light_and_dark_pages(concepts: ModuleType) -> None:
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


def test_peers_and_losses_are_those_of_the_benchmarks() -> None:
    _, rows = comparisons.peers()
    assert any("lightly" in row[0] for row in rows)
    lost = comparisons.lost()[1]
    missed = [t for name in ("", "_text", "_vision", "_hypersphere") for t in comparisons.measured(name)]
    names = {t["name"].strip() for t in missed if t["reached"] is False}
    assert all(any(row[0].endswith(name) for row in lost) for name in names)
    found = [row[:2] for row in lost]
    assert len(set(found)) == len(found)  # each once, and a variant with the name that it belongs to
    assert not any("e+" in row[1] for row in comparisons.other_peers()[1])


def test_dark_colors_are_those_of_the_report() -> None:
    style = (ROOT / "src/uncollapse/report/assets/report.css").read_text(encoding="utf-8")
    pairs = dict(re.findall(r"light-dark\((#\w{6}), (#\w{6})\)", style))
    own = {drawn: shown for drawn, shown in canvas.DARK.items() if drawn not in ("#000000", "#ffffff")}
    assert {drawn: pairs[drawn] for drawn in own} == own
