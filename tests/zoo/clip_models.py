"""Two towers of open_clip, built from small configs: its own transformers, ResNets, and towers of timm."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .entries import IMAGE, LENGTH, Built, Entry

VOCABULARY = 120
TEXT: dict[str, Any] = {"context_length": LENGTH, "vocab_size": VOCABULARY, "width": 32, "heads": 4, "layers": 3}
IMAGES: dict[str, Any] = {"image_size": IMAGE, "layers": 3, "width": 32, "patch_size": 8, "head_width": 8}
TIMM: dict[str, Any] = {"timm_model_pretrained": False, "timm_pool": "", "timm_proj": "linear"}
DECODER = {**TEXT, "mlp_ratio": 2, "dim_head": 8, "n_queries": 5, "attn_pooler_heads": 4}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name -> class, config of images, config of texts
    "CLIP": ("CLIP", IMAGES, TEXT),
    "CLIP with ResNet": ("CLIP", {**IMAGES, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64}, TEXT),
    "CLIP with ViT of timm": (
        "CLIP",
        {**TIMM, "timm_model_name": "test_vit", "image_size": 160, "timm_pool": "avg"},
        TEXT,
    ),
    "CLIP with ConvNeXt": ("CLIP", {**TIMM, "timm_model_name": "test_convnext", "timm_pool": "avg"}, TEXT),
    "CustomTextCLIP": ("CustomTextCLIP", IMAGES, TEXT),
    "SigLIP": ("CustomTextCLIP", IMAGES, {**TEXT, "no_causal_mask": True, "pool_type": "last", "proj_bias": True}),
    "CoCa": (
        "CoCa",
        {**IMAGES, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
        {**TEXT, "embed_cls": True, "output_tokens": True},
    ),
}


def entries(library: str) -> Iterator[Entry]:
    """Yield an entry for each kind, if open_clip is installed."""
    yield from (Entry(f"open_clip/{kind}", kind) for kind in KINDS if find_spec("open_clip"))


def build(library: str, kind: str) -> Built:
    """Build a model with two towers; the texts have no padding."""
    import open_clip

    name, images, texts = KINDS[kind]
    more = {"multimodal_cfg": DECODER} if name == "CoCa" else {}
    model = getattr(open_clip, name)(32, vision_cfg=images, text_cfg=texts, **more)
    if name == "CoCa":
        torch.nn.init.normal_(model.text_decoder.text_projection, std=0.1)  # open_clip leaves it uninitialized
    side = images.get("image_size", IMAGE)
    return Built(model.eval(), [_inputs(3, side, 0), _inputs(2, side, 1)])


def _inputs(count: int, side: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    text = torch.randint(5, VOCABULARY - 1, (count, LENGTH), generator=random)
    text[:, -1] = VOCABULARY - 1  # the end of a text has the largest id
    return {"image": torch.randn(count, 3, side, side, generator=random), "text": text}
