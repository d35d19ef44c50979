"""The towers of open_clip that are its own: image and text transformers of CLIP, CoCa and SigLIP.

A tower of timm or transformers in such a model is found by the backbone of that library. Texts are padded to a fixed
length; what comes after the end of a text is not real where the model does not look at it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones import introspection, random_weights
from uncollapse.backbones.sites import OUTPUT, Block, Context, ReadContext, Site, Stack, join_path, no_context

# x + ls_1(attn(ln_1(x))), then x + ls_2(mlp(ln_2(x)))
PLACES = {
    OUTPUT: Site(""),
    "attention.input": Site("", "input"),
    "attention.norm.input": Site("ln_1", "input"),
    "attention.norm": Site("ln_1"),
    "attention.output": Site("ls_1"),
    "attention.residual": Site("ln_2", "input", carried=True),
    "mlp.norm.input": Site("ln_2", "input"),
    "mlp.norm": Site("ln_2"),
    "mlp.output": Site("ls_2"),
    "mlp.residual": Site(""),
}


def stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Return the transformers of open_clip in a model."""
    from open_clip.transformer import CustomTransformer, Transformer

    modules = dict(model.named_modules())
    found = [(p, m) for p, m in modules.items() if isinstance(m, CustomTransformer | Transformer)]
    return tuple(_stack(path, module, *_around(path, modules)) for path, module in found if len(module.resblocks))


def _around(path: str, modules: Mapping[str, nn.Module]) -> tuple[str, Any]:
    """Return the name of the tower that runs a transformer, and the tower."""
    outer = path.rpartition(".")[0]
    return outer, modules[outer]


def _stack(path: str, module: Any, outer: str, tower: Any) -> Stack:
    prefix = int(hasattr(tower, "class_embedding"))
    causal = getattr(module, "attn_mask", getattr(tower, "attn_mask", None)) is not None
    known = partial(_fixed_context, prefix, causal)
    paths = [join_path(path, name) for name in _blocks(module)]
    attention = module.resblocks[0].attn
    return Stack(
        path=path,
        family="open_clip",
        architecture=type(module).__name__,
        blocks=tuple(Block(f"block {n}", p, _places(p), known) for n, p in enumerate(paths)),
        embed=Site(paths[0], "input"),
        final=_final(path, module, outer, tower),
        layout="tokens" if module.batch_first else "sequence_first",
        context=known,
        outer=(outer, _text_reader(tower, causal)) if hasattr(tower, "token_embedding") else None,
        width=module.resblocks[0].ln_1.normalized_shape[0],
        reinitialize=random_weights.reinitialize,
        facts={"prefix": prefix, "heads": attention.num_heads},
    )


def _blocks(module: Any) -> list[str]:
    """Return the names of the blocks in order; CoCa's decoder looks at the image after each of its blocks."""
    lists = ("resblocks", "cross_attn") if hasattr(module, "cross_attn") else ("resblocks",)
    return [f"{name}.{number}" for number in range(len(module.resblocks)) for name in lists]


def _fixed_context(prefix: int, causal: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    return Context(prefix=prefix, causal=causal)


def _places(path: str) -> dict[str, Site]:
    return {place: Site(join_path(path, site.path), site.side, carried=site.carried) for place, site in PLACES.items()}


def _final(path: str, module: nn.Module, outer: str, tower: Any) -> Site | None:
    """Return the norm after the last block, where all tokens pass it before one is taken."""
    if hasattr(module, "ln_final"):
        return Site(join_path(path, "ln_final"))
    if hasattr(tower, "ln_final"):
        return Site(join_path(outer, "ln_final")) if getattr(tower, "cls_emb", None) is None else None
    first = hasattr(tower, "ln_post") and tower.attn_pool is None and not tower.final_ln_after_pool
    return Site(join_path(outer, "ln_post")) if first else None


def _text_reader(tower: Any, causal: bool) -> ReadContext:
    """Return how the real tokens follow from the arguments of a text tower."""
    pool = getattr(tower, "pool_type", getattr(tower, "text_pool_type", ""))
    end = getattr(tower, "eos_id", getattr(tower, "text_eos_id", None)) if pool == "eos" else None
    if not causal or pool not in ("argmax", "eos") or getattr(tower, "cls_emb", None) is not None:
        return no_context  # padding takes part in the result
    return partial(_text, introspection.argument_names(tower), end)


def _text(names: introspection.Names, end: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    text = introspection.bind_arguments(names, args, kwargs).get("text")
    if not isinstance(text, Tensor) or text.dim() != 2:
        return Context()
    last = (text if end is None else (text == end).int()).argmax(-1)  # the end has the largest id, or its own
    return Context(mask=torch.arange(text.shape[1], device=text.device) <= last[:, None])
