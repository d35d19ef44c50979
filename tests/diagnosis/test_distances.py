"""Histograms of distances: against counts by hand, and the known distribution on the sphere."""

import itertools
from pathlib import Path

import pytest
import torch

import uncollapse as uc
from uncollapse.diagnosis.describe import BINS, bin_shares, row_distances, uniform_distances
from uncollapse.diagnosis.result import Diagnosis

EDGES = torch.linspace(0, 2, BINS + 1, dtype=torch.float64)


def test_few_rows_are_compared_with_all_others() -> None:
    rows = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = rows / rows.norm(dim=-1, keepdim=True)
    naive = torch.tensor([float((a - b).norm()) for a, b in itertools.permutations(unit, 2)])
    assert row_distances(3 * rows) == pytest.approx(bin_shares(naive))
    assert sum(row_distances(rows)) == pytest.approx(1)
    wide = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = wide / wide.norm(dim=-1, keepdim=True)
    naive = torch.tensor([float((a - b).norm()) for a, b in itertools.permutations(unit, 2)])
    assert row_distances(wide) == pytest.approx(bin_shares(naive))


def test_identical_opposite_and_zero_rows() -> None:
    assert row_distances(torch.ones(5, 3))[0] == 1
    assert row_distances(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))[-1] == 1
    assert sum(row_distances(torch.zeros(3, 2))) == 1


@pytest.mark.parametrize("dim", [2, 3, 8, 384, 4096])
def test_random_points_on_the_sphere(dim: int) -> None:
    """(1 + cos)/2 of two uniform points has a beta distribution with both parameters (d − 1)/2."""
    stats = pytest.importorskip("scipy.stats")
    beta = stats.beta((dim - 1) / 2, (dim - 1) / 2)
    below = 1 - beta.cdf((1 - EDGES.square() / 4).numpy())  # cos = 1 − r²/2
    assert uniform_distances(dim) == pytest.approx((below[1:] - below[:-1]).tolist(), abs=2e-3)
    assert sum(uniform_distances(dim)) == pytest.approx(1)


def test_one_dimension_has_two_points() -> None:
    assert uniform_distances(1)[0] == uniform_distances(1)[-1] == 0.5


def test_a_diagnosis_of_rows_has_them_and_its_page_speaks_of_rows(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 16, generator=generator)
    y = x + 0.1 * torch.randn(300, 16, generator=generator)
    d = uc.diagnose_rows([x], pairs=[y], draws=0, labels=uc.Labels("mine"))
    shares = d.layers[0].distances
    assert set(shares) == {"rows", "pairs", "random"}
    assert max(abs(a - b) for a, b in zip(shares["rows"], shares["random"], strict=True)) < 0.02, "they are uniform"
    assert sum(shares["pairs"][:8]) > 0.99, "partners are close"
    assert Diagnosis.from_json(d.to_json()) == d
    pytest.importorskip("jinja2")
    page = d.report(tmp_path / "x.html").read_text(encoding="utf-8")
    text = page[page.index("<main") : page.index("<script")] if "<script" in page[page.index("<main") :] else page
    assert "Distances of rows" in text
    assert "two rows, median" in text
    assert "tokens" not in text.replace('id="tokens', "").replace("#tokens", "").replace("tokens-h", "")


def test_mended_rows_are_compared_under_one_name(tmp_path: Path) -> None:
    rows = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    before = uc.diagnose_rows([rows + 3], draws=0, labels=uc.Labels("x"))
    after = uc.diagnose_rows([rows], draws=0, labels=uc.Labels("x after center"))
    assert any(
        line.startswith("At embeddings the mean cosine is")
        for line in before.compare(after).differences["x after center"]
    )


def test_shares_that_do_not_add_up_are_refused() -> None:
    d = uc.diagnose_rows([torch.randn(30, 4)], draws=0)
    text = d.to_json().replace('"random": [', '"random": [1.0, ')
    with pytest.raises(ValueError, match="add up"):
        Diagnosis.from_json(text)
