"""Load pretrained models that packages store in their own format, and their inputs: MobileSAM's TinyViT, and Whisper.

`examples/real_models.py` measures them. The readers only read tensors and never run code from a file.
"""

import math
import re
import struct
import wave
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# MobileSAM's names of the parts of its image encoder -> timm's. A stage of timm begins where one of MobileSAM ends.
TINY_VIT: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^patch_embed\.seq\.(\d)", lambda found: f"patch_embed.conv{int(found[1]) // 2 + 1}"),
    (r"^layers\.(\d)\.downsample", lambda found: f"stages.{int(found[1]) + 1}.downsample"),
    (r"^layers\.", "stages."),
    (r"\.c\.weight$", ".conv.weight"),
    (r"^norm_head\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
)
# CTranslate2's names of the parts of a Whisper -> transformers'; a linear layer may hold several, one below the other.
WHISPER = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/layer_norm": ("final_layer_norm",),
    "layer_norm": ("layer_norm",),
    "conv1": ("conv1",),
    "conv2": ("conv2",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
}
ENDS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)  # by CTranslate2's number


def load_tiny_vit(file: Path) -> Any:
    """Return the image encoder of a MobileSAM checkpoint as timm's TinyViT, without the neck that SAM adds to it."""
    import timm

    weights = torch.load(file, map_location="cpu", weights_only=True)
    names = [name for name in weights if name.startswith("image_encoder.") and ".neck." not in name]
    model: Any = timm.create_model("tiny_vit_5m_224", num_classes=1000)
    model.stages[3].downsample.conv2.conv.stride = (1, 1)  # as in MobileSAM: the last stage keeps the resolution
    model.load_state_dict({rename_tiny_vit(name): weights[name] for name in names})
    return model.eval()


def rename_tiny_vit(name: str) -> str:
    """Return timm's name of a tensor of MobileSAM's image encoder.

    >>> rename_tiny_vit("image_encoder.layers.0.downsample.conv1.c.weight")
    'stages.1.downsample.conv1.conv.weight'
    """
    name = name.removeprefix("image_encoder.")
    for pattern, new in TINY_VIT:
        name = re.sub(pattern, new, name)
    return name


def load_whisper(file: Path) -> Any:
    """Return a Whisper of transformers with the weights of a CTranslate2 file."""
    from transformers import WhisperConfig, WhisperModel

    arrays = read_ctranslate2(file)
    (vocabulary, width), bins = arrays["decoder/embeddings/weight"].shape, arrays["encoder/conv1/weight"].shape[1]
    layers = {
        part: len({n.split("/")[1] for n in arrays if n.startswith(f"{part}/layer_")} - {"layer_norm"})
        for part in ("encoder", "decoder")
    }
    config: Any = WhisperConfig  # the types of its arguments do not fit numbers by name
    whisper: Any = WhisperModel  # it has no types
    sizes = config(
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=bins,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=int(arrays["encoder/num_heads"]),
        decoder_attention_heads=int(arrays["decoder/num_heads"]),
        encoder_ffn_dim=len(arrays["encoder/layer_0/ffn/linear_0/bias"]),
        decoder_ffn_dim=len(arrays["decoder/layer_0/ffn/linear_0/bias"]),
        max_source_positions=len(arrays["encoder/position_encodings/encodings"]),
        max_target_positions=len(arrays["decoder/position_encodings/encodings"]),
        **{f"{name}_token_id": vocabulary - 1 for name in ("pad", "bos", "eos", "decoder_start")},
    )
    model = whisper(sizes).eval()
    model.load_state_dict(dict(_whisper_tensors(arrays)))
    return model


def _whisper_tensors(arrays: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a Whisper by transformers' names; keys have no bias there, and zeros in the file."""
    for name, tensor in arrays.items():
        if tensor.dim() == 0 or name.startswith("decoder/alignment"):
            continue  # numbers of the architecture
        side, *inner = name.split("/")
        layer = f"layers.{inner.pop(0).removeprefix('layer_')}." if re.match(r"layer_\d", inner[0]) else ""
        end = ENDS.get(inner[-1], inner[-1])
        parts = WHISPER["/".join(inner[:-1])]
        for part, own in zip(parts, tensor.float().chunk(len(parts)), strict=True):
            if not (part.endswith("k_proj") and end == "bias"):
                yield f"{side}.{layer}{part}.{end}", own
            elif own.any():
                raise ValueError(f"{name} has a bias of keys, which a Whisper does not have.")


def read_ctranslate2(file: Path) -> dict[str, Tensor]:
    """Return the named arrays of a `model.bin` of CTranslate2, version 6: numbers and names, nothing else."""
    content, at = file.read_bytes(), 0

    def take(count: int) -> bytes:
        nonlocal at
        if at + count > len(content):
            raise ValueError(f"{file.name} ends after {len(content)} bytes, in the middle of an array.")
        at += count
        return content[at - count : at]

    def number(form: str) -> int:
        return int(struct.unpack(f"<{form}", take(struct.calcsize(form)))[0])

    def text() -> str:
        return take(number("H")).rstrip(b"\0").decode()

    version, kind = number("I"), text()
    if version != 6 or kind != "WhisperSpec":
        raise ValueError(f"{file.name} is not a Whisper in version 6 of CTranslate2's format: got {kind} {version}.")
    _revision, count = number("I"), number("I")
    arrays = {}
    for _ in range(count):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        dtype, size = DTYPES[number("B")], number("I")
        if size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of {file.name} has {size} bytes, which do not fit its shape {shape}.")
        arrays[name] = torch.frombuffer(bytearray(take(size)), dtype=dtype).reshape(shape)
    return arrays


def photographs(file: Path, count: int) -> torch.Tensor:
    """Return the first photographs of each class in turn, 224 × 224, normalised as SAM does it."""
    from PIL import Image

    stored = np.load(file)
    order = np.argsort(
        [np.sum(stored["labels"][:i] == label) for i, label in enumerate(stored["labels"])], kind="stable"
    )
    starts, bytes_of = stored["offsets"], stored["data"]
    opened = [Image.open(BytesIO(bytes_of[starts[i] : starts[i + 1]].tobytes())) for i in order[:count]]
    pixels = np.stack(
        [np.asarray(image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)) for image in opened]
    )
    mean, std = torch.tensor([123.675, 116.28, 103.53]), torch.tensor([58.395, 57.12, 57.375])
    return ((torch.from_numpy(pixels).float() - mean) / std).permute(0, 3, 1, 2)


def speech(file: Path, seconds: int = 30) -> list[np.ndarray]:
    """Return a recording of 16 kHz in pieces of this length, without the rest."""
    with wave.open(str(file)) as sound:
        if (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) != (16_000, 1, 2):
            raise SystemExit(f"{file.name} must have 16,000 samples of 16 bits per second and one channel.")
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 2**15
    length = 16_000 * seconds
    return [samples[start : start + length] for start in range(0, len(samples) - length + 1, length)]


@torch.no_grad()
def transcribed(model: Any, features: torch.Tensor, longest: int = 128) -> dict[str, torch.Tensor]:
    """Return the inputs of a Whisper for one recording: the sound, and the words that the model finds most likely."""
    start, end, no_times = 50257, 50256, 50362  # of English models
    heard, ids = model.encoder(features).last_hidden_state, torch.tensor([[start, no_times]])
    while ids.shape[1] < longest and int(ids[0, -1]) != end:
        last = model.decoder(input_ids=ids, encoder_hidden_states=heard).last_hidden_state[:, -1]
        ids = torch.cat([ids, (last @ model.decoder.embed_tokens.weight.T).argmax(-1, keepdim=True)], 1)
    return {"input_features": features, "decoder_input_ids": ids}
