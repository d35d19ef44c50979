"""Costs by formula: the formulas are those of the code, and its tables come from what was measured."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from website import render, tables
from website.pages import scale

import uncollapse as uc
from uncollapse.pairwise import products

ROOT = Path(__file__).parents[2]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "uniform_loss": lambda x, y: uc.uniform_loss(x),
    "info_nce": uc.info_nce,
    "info_nce both ways": lambda x, y: uc.info_nce(x, y, symmetric=True),
    "info_nce, negatives='both'": lambda x, y: uc.info_nce(x, y, negatives="both"),
    "contra_norm": lambda x, y: uc.contra_norm(x, 0.1).sum(),
}
FACTORS = {"aten::bmm": 0, "aten::mm": 0, "aten::baddbmm_": 1, "aten::baddbmm": 1, "aten::addmm": 1}  # where they stand


def counted(work: Callable[[], Tensor]) -> float:
    """FLOP of all matrix products, forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        work().backward()
    shapes = [event.input_shapes[FACTORS[event.name] :] for event in seen.events() if event.name in FACTORS]
    return sum(2 * math.prod(left) * right[-1] for left, right, *_ in shapes)


def test_losses_take_as_many_products_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_is_faster", lambda: False)  # the same products by operators that are counted here
    assert scale.PRODUCTS.keys() == LOSSES.keys()
    for kind, loss in LOSSES.items():
        x, y = torch.randn(2, 4096, 16).unbind()
        rows = 8192 if "negatives" in kind else 4096  # two views are one set there
        found = counted(lambda loss=loss, x=x, y=y: loss(x.requires_grad_(), y.requires_grad_()))
        share = found / scale.flops(rows, 16, kind)
        assert 1 <= share < 1.25, (kind, share)  # blocks on the diagonal are computed whole


def test_statistics_are_as_large_as_the_page_says() -> None:
    one, other = uc.RowStatistics(256, seed=0), uc.RowStatistics(256, seed=1)
    for part in (one, other):
        part.update(torch.randn(2000, 256))
    sizes = [sum(torch.as_tensor(x).nbytes for x in part.state().values()) for part in (one, one + other)]
    assert sizes[0] == pytest.approx(scale.moments_bytes(256), rel=0.01)
    assert sizes[1] == pytest.approx(scale.merged_bytes(256), rel=0.02)


def test_the_arithmetic_of_a_vision_transformer() -> None:
    assert scale.parameters(**scale.VIT) == 86_567_656  # as timm counts vit_base_patch16_224
    assert scale.training_flops(**scale.VIT) == pytest.approx(3 * 2 * 17.5e9, rel=0.01)
    assert scale.gather_bytes(4096, 128, 1) == (0, 0)
    forward, backward = scale.gather_bytes(4096, 128, 8)
    assert (forward, backward) == (7 / 8 * 4096 * 128 * 4, 7 / 8 * 4096 * 128 * 4)


def test_tables_have_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "RESULTS", tmp_path)
    assert scale.embedded() == ((), [])
    assert scale.checked()[1] == []
    assert len(scale.trained()[1]) == 12  # arithmetic needs no measurement
    targets = [
        {"name": "embeddings: peak of the memory", "measured": 300.0, "detail": "2,000 × 10 float16, 0.01 GB"},
        {"name": "embeddings: time for the file", "measured": 2.0, "detail": "3.0 s …, 4.0 s of processors"},
    ]
    (tmp_path / "benchmarks_streaming.json").write_text(json.dumps({"targets": targets}), encoding="utf-8")
    head, rows = scale.embedded()
    assert head[0] == "10 features in float16"
    assert rows[0] == ("10,000,000 rows", "200 MB", "1 core", "5.56 h", "0.00 GB/s", "300 MiB", "nothing")
    assert [row[0] for row in scale.checked()[1]] == ["`embeddings`, 2,000 × 10", "  its memory"]


def test_the_pages_ask_for_tables_that_there_are() -> None:
    pages = [ROOT / "docs" / f"{name}.md" for name in ("costs", "kernel", "distributed", "embeddings")]
    asked = {name for page in pages for name in render.TABLE.findall(page.read_text(encoding="utf-8"))}
    assert asked >= {*scale.PARTS, "streaming", "overhead", "attaching", "targets"}
    for name in asked:
        assert tables.TABLES[name]().startswith(("| ", "Not run"))
