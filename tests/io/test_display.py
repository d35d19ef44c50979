"""Results show themselves in a notebook: escaped HTML, short texts, figures that can be changed."""

import copy
import pickle
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.report import Comparison


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


@pytest.fixture(scope="module")
def diagnosis() -> uc.Diagnosis:
    plan = uc.Plan(baseline=0)
    return uc.diagnose(encoder(), [torch.randn(8, 12, 32)], labels=uc.Labels("<b>mine</b>", "a & b"), plan=plan)


class Cells(HTMLParser):
    """The texts of all cells, and all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_diagnosis(diagnosis: uc.Diagnosis) -> None:
    page = Cells(diagnosis._repr_html_())
    assert "b" not in page.tags[:1], "names are escaped"
    assert any("<b>mine</b> on a & b" in text for text in page.texts)
    assert {"layer", "effective rank", "block 2", diagnosis.verdict.sentence} <= set(page.texts)
    assert repr(diagnosis) == "<Diagnosis of <b>mine</b>: 4 layers, collapse: none>"
    collapsed = uc.diagnose_activations([torch.randn(8, 32, 16), torch.ones(8, 32, 16)])
    assert "collapse: complete from layer 1 on" in repr(collapsed)
    assert "x = uc.contra_norm(x, scale=0.1)" in Cells(collapsed._repr_html_()).texts


def test_a_comparison(diagnosis: uc.Diagnosis, tmp_path: Path) -> None:
    found = diagnosis.compare(replace(diagnosis, model="other"))
    assert isinstance(found, Comparison)
    page = Cells(found._repr_html_())
    assert {"last block", "other", "<b>mine</b> → other"} <= set(page.texts)
    assert str(found).startswith("<b>mine</b> → other\nThe verdict stays the same")
    assert repr(found) == "<Comparison of <b>mine</b>, other>"
    with pytest.raises(ValueError, match="two"):
        diagnosis.compare()


def test_a_figure_that_can_be_changed(diagnosis: uc.Diagnosis, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = diagnosis.plot("effective_rank")
    figure.axes[0].set_title("changed")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pickle.loads(pickle.dumps(figure)).axes[0].get_title() == "changed"
    assert diagnosis.plot("mean_cosine", tmp_path / "x.svg") == tmp_path / "x.svg"
    assert not list(Path().glob("plot.png"))
    assert diagnosis.compare(diagnosis).plot().axes


def test_an_attachment_and_places() -> None:
    model = encoder()
    places = uc.places(model)
    assert places == tuple(places)
    assert "attention.residual" in places
    page = Cells(places._repr_html_())
    assert {"attention.residual", "TransformerEncoder, 3 blocks", "output of layers.0"} <= set(page.texts)
    assert copy.deepcopy(places) == places == pickle.loads(pickle.dumps(places))
    handle = uc.attach(model, "contra_norm", scale=0.1, learnable=True, layers="last 2")
    page = Cells(handle._repr_html_())
    assert page.texts.count(str(len(handle.parameters()[0].reshape(-1)))) == 2, "the parameters of each"
    assert str(handle) in page.texts


def test_a_bar_of_tqdm_around_the_batches() -> None:
    auto = pytest.importorskip("tqdm.auto")
    batches = [torch.randn(2, 12, 32) for _ in range(3)]
    with auto.tqdm(batches, disable=None) as bar:
        assert uc.diagnose(encoder(), bar, plan=uc.Plan(baseline=0)).batches == 3
