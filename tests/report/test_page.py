"""The page as text: what is there without any script."""

import dataclasses
import math
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import uncollapse as uc
from uncollapse import report
from uncollapse.diagnosis import reference_data
from uncollapse.diagnosis.describe import format_interval
from uncollapse.report.page import render_page
from uncollapse.report.plot_data import page_data

pytest.importorskip("plotly")


class Outline(HTMLParser):
    """Headings, ids, and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.text = ""
        self._raw = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._raw = tag in ("script", "style")
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._raw else data


def test_verdict_evidence_and_every_layer_are_in_the_html_itself(make) -> None:
    d = make("MiniLM", places=("attention.residual",))
    outline = Outline(render_page([d]))
    for expected in (
        "MiniLM",
        "Complete collapse",
        d.verdict.sentence,
        "two tokens point the same way",
        "Only 32 sequences were measured.",
        'uc.attach(model, "contra_norm")',
        "22.7 M parameters",
        "2.13.0",
        *(layer.name for layer in d.layers),
        *(layer.path for layer in d.layers),
    ):
        assert expected in outline.text, expected
    parts = ["verdict", "layers", "spectra", "tokens", "numbers", "measures", "about"]
    assert [name for name in outline.ids if name in parts] == parts


def test_headings_are_in_order_and_ids_are_unique(make) -> None:
    for diagnoses in ([make()], [make("a"), make("b", 0.4)]):
        outline = Outline(render_page(diagnoses))
        assert outline.headings[0] == 1
        assert outline.headings.count(1) == 1
        assert all(b - a <= 1 for a, b in zip(outline.headings, outline.headings[1:], strict=False))
        assert len(outline.ids) == len(set(outline.ids))


def test_nothing_is_loaded_from_elsewhere(make) -> None:
    html = unescape(render_page([make()]))
    assert "default-src 'none'" in html
    assert "unsafe-inline'; img-src" in html
    assert not re.search(r"script-src[^;]*unsafe", html)
    assert not re.search(r"""(?:src|href)=["'](?!#)""", html)
    assert "@import" not in html
    assert "url(" not in html


def test_every_part_that_has_no_data_is_left_out(make) -> None:
    bare = [dataclasses.replace(layer, spectrum=(), spectrum_ranks=(), heatmap=()) for layer in make().layers]
    ids = Outline(render_page([make(layers=tuple(bare), baseline=False)])).ids
    assert "layers" in ids
    assert not {"spectra", "tokens", "difference"} & set(ids)
    assert "layers" not in Outline(render_page([make(names=["embeddings"], baseline=False)])).ids


def test_several_diagnoses_come_with_their_difference(make) -> None:
    text = Outline(render_page([make("before"), make("after", 0.4), make("later", 0.2)])).text
    assert "before, after and later" in text
    for sentence in report.difference(make("before"), make("after", 0.4)):
        assert sentence in text


def test_numbers_that_were_not_measured_do_not_stop_it(make) -> None:
    d = make()
    broken = {k: dataclasses.replace(s, mean=math.nan, quantiles=()) for k, s in d.layers[1].measures.items()}
    layers = (d.layers[0], dataclasses.replace(d.layers[1], measures=broken), *d.layers[2:])
    assert "–" in Outline(render_page([make(layers=layers)])).text


def test_a_measure_of_another_version_is_shown_where_it_was_taken(make) -> None:
    found = make()
    first, *others = found.layers
    newer = dataclasses.replace(first, measures={**first.measures, "newer": first.measures["mean_cosine"]})
    assert ">newer<" in render_page([dataclasses.replace(found, layers=(newer, *others))])


def test_the_file_is_written_as_a_whole(make, tmp_path: Path) -> None:
    target = report.write(make(), tmp_path / "deep" / "report.html", title="A <title>")
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "<title>A &lt;title&gt; · uncollapse</title>" in target.read_text(encoding="utf-8")
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_a_large_comparison_stays_below_six_megabytes(make, tmp_path: Path) -> None:
    many = [make(f"model {i}", 0.9 - 0.2 * i, blocks=30, tokens=48, places=("attention.residual",)) for i in range(3)]
    assert report.write(many, tmp_path / "r.html").stat().st_size < 6_000_000


def test_no_diagnosis_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least"):
        report.write([], tmp_path / "r.html")


def test_without_plotly_the_error_says_what_to_install(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=re.escape('pip install "uncollapse[report]"')):
        report.write(make(), tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_intervals_stand_below_their_values() -> None:
    x = torch.randn(1500, 8, generator=torch.Generator().manual_seed(0))
    d = uc.diagnose_rows(x.split(500), pairs=x.flip(1).split(500), draws=50)
    html = render_page([d])
    for name, over in {"uniformity": "1,024 rows", "alignment": "1,500 pairs"}.items():
        said = format_interval(d.layers[0].intervals[name])
        assert f'<span class="quiet">{said}</span>' in html
        assert f'title="{said}, over {over}"' in html
    assert "Uniformity gap" in Outline(html).text
    bare = render_page([uc.diagnose_rows([x], draws=0)])
    assert "95 %: " not in bare


def test_healthy_models_of_the_same_kind_are_drawn_behind_the_curves(make: Any) -> None:
    d = make("one", settings={"kind": "text encoder"})
    (cosine,) = [m for g in page_data([d])["groups"] for m in g["measures"] if m["name"] == "mean_cosine"]
    band = cosine["healthy"]
    assert (band["x"], band["depth"]) == ((0, 1, 2, 3, 4), [0, 0.25, 0.5, 0.75, 1])
    assert (band["low"][-1], band["high"][-1]) == reference_data.read_healthy()["text encoder"].range_at(
        "mean_cosine", 1.0
    )
    assert "healthy text encoders (MiniLM-L6, " in Outline(render_page([d])).text
    for others in ([make("two")], [d, make("two", settings={"kind": "decoder"})]):
        assert all(m["healthy"] is None for g in page_data(others)["groups"] for m in g["measures"])
        assert "healthy" not in Outline(render_page(others)).text


def test_causes_have_a_section_of_their_own(make: Any) -> None:
    from uncollapse.diagnosis.parts import BlockParts, Change, Parts, Switch
    from uncollapse.diagnosis.result import Cause

    blocks = (BlockParts("block <0>", {"mlp": Change(0.25, -0.5)}, residual=0.0, gradient=1e-9),)
    parts = Parts("block 1", blocks, (Switch("nothing", 0.99, 0.1), Switch("no mixing", 0.2, 0.5)), {"loss": "<none>"})
    plain, found = make("plain"), make("found", parts=parts)
    found.verdict.__dict__["causes"] = (Cause("mixing", "Attention averages <tokens>.", ("It was measured.",)),)
    page = render_page([plain, found])
    for text in (
        'id="causes"',
        "block &lt;0&gt;",
        "+0.25",
        "−0.50",
        "1.0e−9",
        "Attention averages &lt;tokens&gt;.",
        "It was measured.",
        "&lt;none&gt;",
    ):
        assert text in page, text
    assert 'id="causes"' not in render_page([plain])
