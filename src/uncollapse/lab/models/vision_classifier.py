"""Vision transformers of timm in any size, with talking heads and cures."""

from typing import Any

from torch import Tensor, nn

from uncollapse.attachment.attach import attach
from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, import_optional
from uncollapse.io import timm_models
from uncollapse.io.loading import silence_libraries

INITS = {"timm": "", "xavier": "jax"}  # ours -> timm's; timm's own has a standard deviation of 0.02 at any width
FAMILIES = ("vision_transformer", "deit")  # modules of timm whose models have the same blocks and arguments


def build_vit(name: str, classes: int, *, talking_heads: bool = False, init: str = "timm", **sizes: Any) -> nn.Module:
    """Return a vision transformer with random weights.

    Args:
        name: Name of the model in timm.
        classes: Outputs of its head.
        talking_heads: Whether attention heads are mixed before and after the softmax, see `TalkingHeads`.
        init: "timm", or "xavier", which depends on the width.
        sizes: Arguments of timm's model, such as depth, embed_dim, num_heads, img_size, patch_size, drop_path_rate.
            None and 0 stand for the model's own.
    """
    timm_models.check_name(name, FAMILIES)
    _check_family(name)
    given = {argument: value for argument, value in sizes.items() if value or value is False}
    try:
        with silence_libraries():
            model: Any = import_optional("timm", "timm").create_model(
                name, num_classes=classes, weight_init=INITS[init], **given
            )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"timm cannot build {name!r} with {_describe(given)}: {reason}") from error
    _check_patches(model, name)
    if talking_heads:
        for block in model.blocks:
            block.attn = TalkingHeads(getattr(block, "attn", None))
    vit: nn.Module = model
    return vit


def sizes_of(vit: Any) -> dict[str, Any]:
    """Return the arguments with which `build_vit`, or timm, builds a transformer of the same size."""
    return {
        "depth": len(vit.blocks),
        "embed_dim": vit.embed_dim,
        "num_heads": heads_of(vit),
        "img_size": list(vit.patch_embed.img_size),
        "patch_size": list(vit.patch_embed.patch_size),
    }


def heads_of(vit: Any) -> int:
    """Return the number of attention heads, which no shape of a weight reveals."""
    return int(next(module.num_heads for module in vit.blocks.modules() if hasattr(module, "num_heads")))


def _check_family(name: str) -> None:
    entry = import_optional("timm.models", "timm").model_entrypoint(name.partition(".")[0])
    if entry.__module__.rpartition(".")[2] not in FAMILIES:
        raise UsageError(
            f"{name} is not a plain vision transformer of timm. Take a vit_… or deit_…, such as deit_tiny_patch16_224."
        )


def _check_patches(model: Any, name: str) -> None:
    """Raise a UsageError unless the model cuts the whole image into patches, one token each."""
    layers: Any = import_optional("timm.layers", "timm")
    if not isinstance(model, _transformer()) or not isinstance(model.patch_embed, layers.PatchEmbed):
        kind = f"{type(model).__name__} with {type(getattr(model, 'patch_embed', None)).__name__}"
        raise UsageError(f"{name} is not a plain vision transformer (vit_…, deit_…) of timm but {kind}.")
    image, patch = model.patch_embed.img_size or (0, 0), model.patch_embed.patch_size
    if any(side % step for side, step in zip(image, patch, strict=True)):
        step, near = patch[0], max(patch[0], round(image[0] / patch[0]) * patch[0])
        raise UsageError(
            f"An image of {image[0]} pixels cannot be cut into patches of {step} pixels. Take a multiple of {step} for "
            f"the image, such as {near}, or another patch size."
        )


class TalkingHeads(nn.Module):
    """Attention whose heads are mixed by a linear map before the softmax and by another one after it.

    Talking-Heads Attention (arXiv 2003.02436), as in DiversePatch's released code. It takes over the projections of an
    attention of timm. Both maps start as the identity, so it starts as that attention.

    `attn_drop`, and so a diagnosis, sees the output of the softmax: after the second map rows need not sum to one, and
    entries may be negative.
    """

    fused_attn = False  # attention maps are needed, and `attn_drop` sees them

    def __init__(self, attention: Any) -> None:
        super().__init__()
        _check_attention(attention)
        self.num_heads, self.scale = attention.num_heads, attention.scale
        self.qkv, self.proj = attention.qkv, attention.proj
        self.attn_drop, self.proj_drop = attention.attn_drop, attention.proj_drop
        self.before = nn.Linear(self.num_heads, self.num_heads, bias=False)
        self.after = nn.Linear(self.num_heads, self.num_heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both maps to the identity."""
        nn.init.eye_(self.before.weight)
        nn.init.eye_(self.after.weight)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend over tokens (b, n, d)."""
        if attn_mask is not None or is_causal:
            raise ValueError("Talking heads take no mask and are not causal.")
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        logits = (q * self.scale) @ k.mT  # (b, heads, n, n)
        attention = self.attn_drop(_over_heads(self.before, logits).softmax(-1))
        out = _over_heads(self.after, attention) @ v  # (b, heads, n, d / heads)
        mixed: Tensor = self.proj_drop(self.proj(out.transpose(1, 2).reshape(b, n, d)))
        return mixed


def _check_attention(attention: Any) -> None:
    """Raise a UsageError if talking heads with identity maps would not compute the same as this attention."""
    plain = type(attention) is import_optional("timm.models.vision_transformer", "timm").Attention
    steps = [getattr(attention, name, None) for name in ("q_norm", "k_norm", "norm", "gate")]
    plain = plain and all(step is None or isinstance(step, nn.Identity) for step in steps)
    if not plain or attention.qkv.out_features != 3 * attention.qkv.in_features:
        raise UsageError(
            "Talking heads replace timm's plain attention, as wide as the model, without a gate and without norms of "
            f"queries, keys or outputs; got {type(attention).__name__} of another form. Take another model, or leave "
            "out talking_heads."
        )


def _over_heads(linear: nn.Linear, maps: Tensor) -> Tensor:
    mixed: Tensor = linear(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return mixed


def put_cure(model: nn.Module, name: str, **options: Any) -> None:
    """Attach a cure to the model; "none" leaves it unchanged."""
    if name == "none":
        return
    try:
        attach(model, name, tokens="all", **options)  # as published
    except ValueError as error:  # a place or an option that does not fit this model
        raise UsageError(str(error)) from error


def _transformer() -> Any:
    torchvision_ops.declare()
    return import_optional("timm.models.vision_transformer", "timm").VisionTransformer


def _describe(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items()) or "its own sizes"
