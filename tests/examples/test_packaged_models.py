"""Weights in the form of other packages become the same network: TinyViT of MobileSAM, Whisper of CTranslate2."""

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import packaged_models  # noqa: E402

PARTS = {new: (old, number) for old, parts in packaged_models.WHISPER.items() for number, new in enumerate(parts)}


def small_whisper() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "vocab_size": 30}
    places = {"max_source_positions": 10, "max_target_positions": 12}
    ids = {f"{name}_token_id": 29 for name in ("pad", "bos", "eos", "decoder_start")}
    return transformers.WhisperModel(transformers.WhisperConfig(**sizes, **heads, **places, **ids)).eval()


def as_ctranslate2(model: Any) -> dict[str, Tensor]:
    """Return the tensors of a Whisper under CTranslate2's names; parts of one linear layer lie below each other."""
    found: dict[str, dict[int, Tensor]] = {}
    weights = model.state_dict()
    zeros = {n.replace("weight", "bias"): torch.zeros(16) for n in weights if n.endswith("k_proj.weight")}
    for name, tensor in {**weights, **zeros}.items():
        side, *inner, end = name.split(".")
        layer = f"layer_{inner[1]}/" if inner[0] == "layers" else ""
        part, number = PARTS[".".join(inner[2:] if layer else inner)]
        ends = (
            {"weight": "gamma", "bias": "beta"} if "norm" in part else {"weight": "encodings"} if "pos" in part else {}
        )
        found.setdefault(f"{side}/{layer}{part}/{ends.get(end, end)}", {})[number] = tensor
    heads = {f"{side}/num_heads": torch.tensor(4, dtype=torch.int16) for side in ("encoder", "decoder")}
    return heads | {name: torch.cat([own[n] for n in sorted(own)]) for name, own in found.items()}


def packed(arrays: dict[str, Tensor], version: int = 6) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    content = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(arrays))
    for name, array in arrays.items():
        kind, data = packaged_models.DTYPES.index(array.dtype), array.numpy().tobytes()
        content += text(name) + struct.pack(f"<B{array.dim()}I", array.dim(), *array.shape)
        content += struct.pack("<BI", kind, len(data)) + data
    return content + struct.pack("<I", 0)


def test_a_whisper_of_ctranslate2_is_the_same_network(tmp_path: Path) -> None:
    model, file = small_whisper(), tmp_path / "model.bin"
    file.write_bytes(packed(as_ctranslate2(model)))
    given = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": torch.randint(0, 29, (2, 7))}
    with torch.no_grad():
        ours, theirs = packaged_models.load_whisper(file)(**given), model(**given)
    torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state)


@pytest.mark.parametrize(
    ("damage", "word"), [(lambda c: c[:-40], "ends after"), (lambda c: b"\7" + c[1:], "version 6")]
)
def test_a_damaged_file_is_refused(damage: Any, word: str, tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(damage(packed(as_ctranslate2(small_whisper()))))
    with pytest.raises(ValueError, match=word):
        packaged_models.read_ctranslate2(file)


def test_the_image_encoder_of_mobile_sam_has_every_tensor_of_tiny_vit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("tiny_vit_5m_224", num_classes=1000).eval()
    back = {packaged_models.rename_tiny_vit(name): name for name in map(_in_mobile_sam, model.state_dict())}
    assert set(back) == set(model.state_dict())
    weights = {back[name]: tensor for name, tensor in model.state_dict().items()}
    torch.save(
        {**weights, "image_encoder.neck.0.weight": torch.zeros(1), "mask_decoder.x": torch.zeros(1)},
        tmp_path / "sam.pt",
    )
    loaded, image = packaged_models.load_tiny_vit(tmp_path / "sam.pt"), torch.randn(1, 3, 64, 64)
    model.stages[3].downsample.conv2.conv.stride = (1, 1)
    with torch.no_grad():
        assert torch.equal(loaded(image), model(image))


def _in_mobile_sam(name: str) -> str:
    """Return the name of a tensor of timm's TinyViT in a checkpoint of MobileSAM."""
    head, _, rest = name.partition(".")
    if head == "patch_embed":
        rest = {"conv1": "seq.0", "conv2": "seq.2"}[rest.partition(".")[0]] + "." + rest.partition(".")[2]
    if head == "stages":
        stage, _, rest = rest.partition(".")
        head, rest = "layers", f"{int(stage) - rest.startswith('downsample')}.{rest}"
    if head == "head":
        head, _, rest = rest.partition(".")
        head = {"norm": "norm_head", "fc": "head"}[head]
    return f"image_encoder.{head}.{rest}".replace(".conv.weight", ".c.weight")
