"""A fixed sample of the zoo, one architecture per test: nothing in it may be silently wrong."""

import json
from pathlib import Path

import pytest

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
pytest.importorskip("transformers")
pytest.importorskip("timm")
pytest.importorskip("torch_geometric")

from .check import check  # noqa: E402
from .entries import Entry  # noqa: E402
from .results import NOT_BUILT, worst  # noqa: E402

RESULTS = Path(__file__).parents[2] / "results" / "zoo.json"
SAMPLE = (
    *("transformers/bert", "transformers/albert", "transformers/gpt2", "transformers/llama", "transformers/mixtral"),
    *("transformers/t5", "transformers/bart", "transformers/clip", "transformers/vit", "transformers/dinov2"),
    *(
        "transformers/swin",
        "transformers/segformer",
        "transformers/convnext",
        "transformers/hiera",
        "transformers/mamba",
    ),
    *("transformers/rwkv", "transformers/recurrent_gemma", "transformers/xlnet", "transformers/funnel"),
    *("transformers/longformer", "transformers/wav2vec2", "transformers/whisper", "transformers/videomae"),
    *("transformers/esm", "transformers/fnet", "transformers/deberta-v2", "transformers/qwen3_moe"),
    *("torch/own GPT with is_causal", "torch/own encoder", "torch/own residual CNN", "torch/Transformer"),
    *("torch/LSTM layers", "torch_geometric/GCN", "torch_geometric/GAT", "torch_geometric/GINEConv"),
    *("torch_geometric/DeepGCN", "torch_geometric/Hetero", "sentence_transformers/mean pooling"),
    *("torch/MLP", "torch/TransformerDecoder"),
)


@pytest.mark.parametrize("name", SAMPLE)
def test_nothing_is_silently_wrong(name: str) -> None:
    row = check(Entry(name, name.partition("/")[2]))
    assert NOT_BUILT not in row, row[NOT_BUILT]
    assert worst(row) not in ("silent", "failed"), json.dumps(row, indent=1)


@pytest.mark.skipif(not RESULTS.exists(), reason="the zoo was not run yet")
def test_the_sample_is_as_in_the_results() -> None:
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    assert len(SAMPLE) == len(set(SAMPLE)) == 40
    assert [name for name in SAMPLE if name not in rows] == []
    assert [name for name, row in rows.items() if worst(row) == "silent"] == []
