"""Vision transformers of timm: vit, deit, beit, eva and all others whose blocks pass one sequence of tokens on.

A model is known by `blocks` and `num_prefix_tokens`, and by blocks of `norm1`, `attn`, `norm2` and `mlp`; those of a
`VisionTransformer` may be of another kind. Hierarchical models (Swin) and those whose class token joins late (CaiT) do
not fit; name their layers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones import introspection, random_weights
from uncollapse.backbones.sites import OUTPUT, Block, Context, Second, Site, Stack, Values, join_path

# Place -> site within the block. The output of drop_path is what is added to the residual, with layer scale.
ANY_BLOCK = {OUTPUT: Site(""), "attention.input": Site("", "input")}
PRE_NORM = {
    **ANY_BLOCK,
    "attention.norm.input": Site("norm1", "input"),
    "attention.norm": Site("norm1"),
    "attention.context": Site("attn.proj", "input"),
    "attention.output": Site("drop_path1"),
    "attention.residual": Site("norm2", "input", carried=True),
    "mlp.norm.input": Site("norm2", "input"),
    "mlp.norm": Site("norm2"),
    "mlp.output": Site("drop_path2"),
    "mlp.residual": Site(""),
}
# x + norm1(attn(x)): the norms are within the branches, so only the MLP reads the stream after attention.
RES_POST_NORM = {
    **ANY_BLOCK,
    "attention.context": Site("attn.proj", "input"),
    "attention.norm.input": Site("norm1", "input"),
    "attention.output": Site("drop_path1"),
    "attention.residual": Site("mlp", "input", carried=True),
    "mlp.norm.input": Site("norm2", "input"),
    "mlp.output": Site("drop_path2"),
    "mlp.residual": Site(""),
}
ORDERS: dict[tuple[str, ...], dict[str, Site]] = {
    ("norm1", "attn", "norm2", "mlp"): PRE_NORM,
    ("attn", "norm1", "mlp", "norm2"): RES_POST_NORM,
}


def stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Return the vision transformers of timm in a model."""
    return tuple(_stack(path, module) for path, module in model.named_modules() if _fits(module))


def _fits(module: nn.Module) -> bool:
    from timm.models.vision_transformer import VisionTransformer

    blocks, prefix = getattr(module, "blocks", None), getattr(module, "num_prefix_tokens", None)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks) or not isinstance(prefix, int):
        return False
    if hasattr(module, "blocks_token_only"):  # CaiT: its class token enters after these blocks
        return False
    return isinstance(module, VisionTransformer) or all(_order(block) in ORDERS for block in blocks)


def _order(block: nn.Module) -> tuple[str, ...]:
    """Return the norms and branches of a block; timm lists them in the order in which they run."""
    return tuple(name for name, _ in block.named_children() if name in ("attn", "mlp") or name.startswith("norm"))


def _stack(path: str, module: Any) -> Stack:
    children = enumerate(module.blocks.named_children())
    blocks = tuple(
        _block(number, join_path(path, f"blocks.{name}"), block, module.num_prefix_tokens)
        for number, (name, block) in children
    )
    has_norm = isinstance(getattr(module, "norm", None), nn.Module) and not isinstance(module.norm, nn.Identity)
    return Stack(
        path=path,
        family="timm",
        architecture=type(module).__name__,
        blocks=blocks,
        embed=blocks[0].places["attention.input"],
        final=Site(join_path(path, "norm")) if has_norm else None,
        context=partial(_context, module.num_prefix_tokens, introspection.argument_names(module)),
        width=module.embed_dim,
        expose_attention=partial(_without_fused, join_path(path, "blocks"))
        if any(b.attention for b in blocks)
        else None,
        reinitialize=partial(random_weights.reinitialize, initialize=_initialize),
        facts=_facts(module),
    )


def _block(number: int, path: str, block: nn.Module, prefix: int) -> Block:
    parts = {name: join_path(path, name) for name, _ in block.named_modules()}
    table = ORDERS.get(_order(block), ANY_BLOCK)
    known = [(place, site) for place, site in table.items() if site.path in parts]
    places = {place: replace(site, path=parts[site.path]) for place, site in known}
    attentions = {parts[name]: part for name, part in block.named_modules() if hasattr(part, "fused_attn")}
    fused = list(attentions)
    # Blocks with several attentions side by side have no single map.
    attention = Site(f"{fused[0]}.attn_drop", "input", "attention") if len(fused) == 1 else None
    context = partial(_block_context, prefix, introspection.argument_names(block))
    values = _values(path, block)
    second = None if len(fused) != 1 else Second(fused[0], "fused_attn", _unfuse, Site(f"{fused[0]}.attn_drop"))
    in_tiles = len(fused) == 1 and _calls_fused(attentions[fused[0]])
    tiled = Site(fused[0], what="attention") if in_tiles else None
    return Block(f"block {number}", path, places, context, 0, attention, values, second, tiled)


def _calls_fused(attention: Any) -> bool:
    """Return whether attention calls torch's `scaled_dot_product_attention` once, for the map that it has unfused."""
    return attention.fused_attn and introspection.count_uses(attention, "scaled_dot_product_attention") == 1


def _unfuse(module: nn.Module, receive: Callable[[Tensor], Tensor]) -> bool:
    """Return that attention is not fused: the map then passes through `attn_drop`, before it is applied."""
    return False


def _values(path: str, block: Any) -> Values | None:
    """Return the values of attention whose heads enter the projection unchanged."""
    attn: Any = getattr(block, "attn", None)
    heads, plain = getattr(attn, "num_heads", None), isinstance(getattr(attn, "norm", None), nn.Identity)
    own = next((name for name in ("v_proj", "qkv") if isinstance(getattr(attn, name, None), nn.Linear)), None)
    if own is None or not plain or not isinstance(heads, int) or not isinstance(getattr(attn, "proj", None), nn.Linear):
        return None
    width = attn.proj.in_features
    return Values(f"{path}.attn.{own}", heads, first=getattr(attn, own).out_features - width)


def _block_context(
    prefix: int, names: introspection.Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Context:
    given = introspection.bind_arguments(names, args, kwargs)
    mask = given.get("attn_mask")
    if mask is not None and mask.dim() == 2:  # of queries and keys, the same for all images
        mask = mask[None]
    hint = bool(given.get("is_causal", False))
    return Context(introspection.keys_seen(mask), prefix=prefix, causal=hint or introspection.hides_later(mask))


def _context(prefix: int, names: introspection.Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    given = introspection.bind_arguments(names, args, kwargs)
    packed = given.get("x")
    source = packed if isinstance(packed, Mapping) else given  # NaFlex takes patches with their padding as a mapping
    valid = source.get("patch_valid")
    return Context(mask=_with_prefix(valid, prefix), prefix=prefix, causal=bool(given.get("is_causal", False)))


def _with_prefix(valid: Tensor | None, prefix: int) -> Tensor | None:
    """Return the mask (b, n) of real patches, with the prefix tokens before them."""
    return None if valid is None else torch.cat([valid.new_ones(len(valid), prefix), valid], 1).bool()


@contextmanager
def _without_fused(path: str, model: nn.Module) -> Iterator[None]:
    """Switch fused attention off, so that attention maps pass through `attn_drop`."""
    modules: list[Any] = [m for m in model.get_submodule(path).modules() if hasattr(m, "fused_attn")]
    fused = [(module, module.fused_attn) for module in modules]
    try:
        for module, _ in fused:
            module.fused_attn = False
        yield
    finally:
        for module, before in fused:
            module.fused_attn = before


def _initialize(module: Any) -> None:
    """Reset a module; timm models and some layers then adjust the start values in `init_weights`."""
    random_weights.reset(module)
    if type(module).__module__.startswith("timm.") and hasattr(module, "init_weights"):
        module.init_weights()


def _facts(module: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"prefix": module.num_prefix_tokens}
    heads = getattr(getattr(module.blocks[0], "attn", module.blocks[0]), "num_heads", None)
    embed: Any = getattr(module, "patch_embed", None)
    if isinstance(heads, int):
        facts["heads"] = heads
    if getattr(embed, "strict_img_size", False):  # images of any size have no fixed grid
        facts["grid"] = [int(side) for side in embed.grid_size]
    return facts
