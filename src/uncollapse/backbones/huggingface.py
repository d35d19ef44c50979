"""transformers 5: any model with attention blocks, also deep inside a user's own module.

Blocks are found by a general rule: a list of modules of one class inside a `PreTrainedModel`, some with attention. All
places of a block are known for the kinds in `huggingface_blocks`: BERT, RoBERTa, ELECTRA, ALBERT, DistilBERT, MPNet,
DeBERTa, ModernBERT, BART, ViT, DeiT, DINOv2, CLIP, GPT-2, Llama, Gemma, and copies of these. Blocks of other
kinds only have the place "block": tested with T5, OPT, GPT-NeoX, Phi, OLMo 2, Bloom, BEiT, XLNet, Wav2Vec2, Whisper.

Encoder–decoders and models with towers have one stack for each; the blocks of all stages, as in Swin, are one. Audio
comes with a mask of samples, not of tokens: it is not read, and all tokens count as real.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones import axes, introspection
from uncollapse.backbones.attention_calls import IMPLEMENTATION, attend_twice, implementation_of
from uncollapse.backbones.huggingface_blocks import (
    Run,
    ancestors,
    entry_path,
    find_runs,
    kind_of,
    lies_within,
    numbers,
    order_of_use,
    places,
    pretrained_ancestors,
    takes_input,
)
from uncollapse.backbones.introspection import argument_names, width
from uncollapse.backbones.random_weights import SEED, check_not_quantized, is_of_cure, reset_cures
from uncollapse.backbones.sites import OUTPUT, Block, Context, Layout, ReadContext, Second, Side, Site, Stack, Values

_PREFIX = ("cls_token", "class_embedding", "distillation_token", "register_tokens")  # parameters of vision embeddings
_FINAL = (
    *("layernorm", "LayerNorm", "layer_norm", "norm", "ln", "ln_f"),
    *("final_layer_norm", "final_layernorm", "final_norm"),
)
_AUDIO = ("input_values", "input_features")
_PADDING = "decoder_padding_mask"  # of FSMT: True = padding
_SIDE_BY_SIDE = "Its blocks take the tokens and their predictions side by side, and all of these are measured."
_PACKED = (
    "documents are packed into one row (positions start again), and the cure would mix them; give each its own row"
)
_OWN_MASK = "the mask is one of queries and keys, which may hide any token from any other; pass one of tokens (b, n)"
_MADE_MASK = (
    "the model makes a mask that hides some tokens from some others, as in a prefix language model, and the cure "
    "handles only all or none; attach it to another part (part=…)"
)
_STREAMS = "its blocks take the tokens and their predictions side by side, and the cure would show these later tokens"
_SEQUENCE_FIRST = ("xlnet", "fsmt")  # model types whose blocks take (n, b, d)
_REVERSED = "its layers are reversible, and their backward pass computes gradients without the cure"


def stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Return all stacks of blocks in the transformers models that `model` is or contains."""
    found = find_runs(model)
    return tuple(_stack(model, run, entry_path(model, run, found), found) for run in found)


def _stack(model: nn.Module, run: Run, path: str, runs: list[Run]) -> Stack:
    module: Any = model.get_submodule(path)
    around = pretrained_ancestors(model, run.blocks[0][0])
    config = getattr(module, "config", around[0][1].config)
    prefix = _prefix(module)
    block = model.get_submodule(run.blocks[0][0])
    causal = _causal(module, block, config)
    known = takes_input(module) and not run.in_stages
    blocks = tuple(
        _block(model, i, name, call, known, partial(_block_context, i, prefix, causal))
        for i, (name, call) in enumerate(run.blocks)
    )
    masked = any(name in argument_names(module) for name in ("attention_mask", _PADDING))
    by_blocks = "attention_mask" in argument_names(block)  # they are told which tokens are real
    made = _is_mask_made(model, run, path)
    unknown = run.in_stages or not known or kind_of(block) is None
    of_images = unknown and around[0][1].main_input_name == "pixel_values"
    if of_images:  # blocks may give images (b, d, h, w) or (b, h, w, d)
        blocks = tuple(replace(b, places={OUTPUT: _image_site(model, b.path, "output")}) for b in blocks)
    return Stack(
        path=path,
        family="huggingface",
        architecture=type(module).__name__,
        blocks=blocks,
        embed=_image_site(model, run.blocks[0][0], "input") if of_images else Site(run.blocks[0][0], "input"),
        final=_final(model, run, path),
        layout=_layout(config, block) or ("auto" if of_images else "tokens"),
        context=_reader(model, run, path, runs, Context(prefix=prefix, causal=causal)),
        refusal=partial(_refusal, causal, argument_names(module), _always_refused(module), made),
        needs_owner=masked and (_in_windows(config) or not by_blocks),
        knows_causality=causal or _looks_both_ways(module, block),
        width=getattr(config, "hidden_size", None) if known else None,
        numbers=numbers(blocks[0].places, config.model_type),
        expose_attention=partial(_eager, path=path) if any(block.attention for block in blocks) else None,
        reinitialize=partial(_reinitialize, path=around[-1][0]),
        remark=_remark(model, run, block) or (_SIDE_BY_SIDE if _has_streams(module) else ""),
        facts={
            "model_type": config.model_type,
            "hidden_size": getattr(config, "hidden_size", None),
            "heads": getattr(config, "num_attention_heads", None),
            **_kind(config, causal),
        },
    )


def _kind(config: Any, causal: bool) -> dict[str, str]:
    """Return the kind of a language model: "text encoder" or "decoder"; nothing of other models."""
    from transformers.models.auto import modeling_auto as auto

    known = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if causal else auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.model_type not in known or getattr(config, "is_encoder_decoder", False):
        return {}
    return {"kind": "decoder" if causal else "text encoder"}


def _block(model: nn.Module, number: int, path: str, call: int, known: bool, read: Callable[..., Context]) -> Block:
    """Describe a block. `known` is false for stages (windows, fewer tokens): only the output of a block is certain."""
    block, owner = model.get_submodule(path), pretrained_ancestors(model, path)[0][1]
    context = partial(read, introspection.argument_names(block))
    if not known:
        return Block(f"block {number}", path, {OUTPUT: Site(path)}, context, call)
    attention, values = _attention(block, path, owner), _values(block, path, owner.config)
    second = _second(model, attention, values)
    fused = attention if _calls_fused(model, attention) else None
    return Block(f"block {number}", path, places(block, path), context, call, attention, values, second, fused)


def _image_site(model: nn.Module, path: str, side: Side) -> Site:
    """Return a site at which there may be images; their axes depend on the modules there."""
    return Site(path, side, axes=axes.read_axes(dict(model.named_modules()), path, side))


def _second(model: nn.Module, attention: Site | None, values: Values | None) -> Second | None:
    """Return how the attention applies its map twice, if it is one that takes registered attention functions."""
    if attention is None or values is None or not values.path.startswith(f"{attention.path}."):
        return None
    takes = _takes_functions(model.get_submodule(attention.path))
    return Second(attention.path, "config", attend_twice) if takes else None


def _takes_functions(attention: nn.Module) -> bool:
    """Return whether an attention takes registered attention functions."""
    return "ALL_ATTENTION_FUNCTIONS" in introspection.code_names(attention) and hasattr(attention, "config")


def _calls_fused(model: nn.Module, attention: Site | None) -> bool:
    """Return whether an attention calls torch's `scaled_dot_product_attention`."""
    module: Any = None if attention is None else model.get_submodule(attention.path)
    return module is not None and _takes_functions(module) and getattr(*implementation_of(module.config)) == "sdpa"


def _values(block: nn.Module, path: str, config: Any) -> Values | None:
    """Return the values of a block's attention; they follow queries and keys if one module computes all three."""
    kind = kind_of(block)
    if kind is None or not kind.values or kind.values not in dict(block.named_modules()):
        return None
    context = width(block.get_submodule(kind.places["attention.context"].path), "input")
    given = width(block.get_submodule(kind.values), "output")
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    if context is None or given is None or _mixes_values(config):
        return None
    own = context // heads * shared
    if given not in (own, context + 2 * own):  # as in ConvBERT, where half of the heads are convolutions
        return None
    return Values(f"{path}.{kind.values}", shared, given - own, heads // shared)


def _mixes_values(config: Any) -> bool:
    """Return whether values are mixed with keys head by head, or rotated, after they leave their module."""
    return getattr(config, "multi_query", None) is False or bool(getattr(config, "rotary_value", False))


def _attention(block: nn.Module, path: str, owner: Any) -> Site | None:
    """Return where the block returns its attention map, according to the model's class; None if it does not say."""
    recorder = owner.can_record_outputs.get("attentions")
    described = kind_of(block)
    if recorder is None and described is not None and described.maps:
        return Site(f"{path}.{described.maps}", what="attention")
    kind, index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 1)
    where = (getattr(recorder, "layer_name", None) or "").strip(".")
    if not isinstance(kind, type) or index != 1:  # after something else of this shape, such as T5's position bias
        return None
    inner = (f"{path}.{name}".rstrip(".") for name, module in block.named_modules() if isinstance(module, kind))
    return next((Site(name, what="attention") for name in inner if not where or f".{where}." in f".{name}."), None)


def _final(model: nn.Module, run: Run, path: str) -> Site | None:
    """Return the norm that one of the modules from the blocks up to `path` applies after them."""
    inner = run.path
    for outer, module in ancestors(model, run.path):
        used = order_of_use(module)
        child = inner.rpartition(".")[2]
        after = used[used.index(child) + 1 :] if child in used else ()
        norm = next((n for n in after if n in _FINAL and "Norm" in type(module._modules[n]).__name__), None)
        if norm is not None or outer == path:
            return None if norm is None else Site(f"{outer}.{norm}".lstrip("."))
        inner = outer
    return None


def _prefix(module: nn.Module) -> int:
    """Return how many learned tokens come before the patches."""
    learned = {name.rpartition(".")[2]: p for name, p in module.named_parameters()}
    return sum(learned[n].shape[1] if learned[n].dim() == 3 else 1 for n in _PREFIX if n in learned)


def _causal(module: nn.Module, block: nn.Module, config: Any) -> bool:
    """Return whether a token sees only earlier ones: the attention says so, or the model creates no other mask."""
    if getattr(config, "use_bidirectional_attention", False):
        return False
    names = introspection.code_names(module)
    only_causal = "create_causal_mask" in names and "create_bidirectional_mask" not in names
    flags = ("is_causal", "is_decoder", "causal")  # the last one is XLM's
    if only_causal or any(getattr(m, flag, False) for m in (module, *block.modules()) for flag in flags):
        return True
    one_way = getattr(module, "attn_type", "") == "uni"  # XLNet
    return one_way or any(_hides_later(buffer) for buffer in block.buffers())


def _remark(model: nn.Module, run: Run, block: nn.Module) -> str:
    """Return a remark if blocks are not modules of their own, as in XLM: only their attentions can be measured."""
    if not type(block).__name__.endswith("Attention"):
        return ""
    outer, _, own = run.path.rpartition(".")
    lists = {name for name, child in model.get_submodule(outer).named_children() if isinstance(child, nn.ModuleList)}
    others = ", ".join(sorted(lists - {own})) or "other modules"
    return f"Its blocks are not modules: the attentions in {run.path} are measured, and not {others}."


def _in_windows(config: Any) -> bool:
    """Return whether blocks get a mask of windows, which does not say which tokens are real, as in LongT5."""
    return getattr(config, "encoder_attention_type", None) in ("local", "transient-global")


def _looks_both_ways(module: nn.Module, block: nn.Module) -> bool:
    """Return whether a model that does not say that it is causal is known not to be: it is of a known kind, or masks
    nothing but padding, or reads images.
    """
    of_images = getattr(module, "main_input_name", "") == "pixel_values"
    masks = "create_bidirectional_mask" in introspection.code_names(module)
    return of_images or masks or kind_of(block) is not None


def _hides_later(buffer: Tensor) -> bool:
    """Return whether a buffer is the mask of a decoder, as in the first GPT: ones up to the diagonal."""
    n = buffer.shape[-1] if buffer.dim() >= 2 else 0
    if n < 2 or buffer.numel() != n * n or buffer.is_meta:
        return False
    return torch.equal(buffer.reshape(n, n) != 0, buffer.new_ones(n, n, dtype=torch.bool).tril())


def _reader(model: nn.Module, run: Run, path: str, runs: list[Run], known: Context) -> ReadContext:
    """Return what reads the context of the owner at `path`.

    Its mask may be made by a model around it, as in PaliGemma, or be that of another stack, as in BridgeTower: then
    what the blocks get counts.
    """
    module, names = model.get_submodule(path), argument_names(model.get_submodule(path))
    by_blocks = "attention_mask" in argument_names(model.get_submodule(run.blocks[0][0]))
    shared = any(other is not run and lies_within(other.path, path) for other in runs)
    if getattr(module, "main_input_name", "") in _AUDIO or (shared and by_blocks):
        return partial(_fixed_context, known)
    made = by_blocks and _is_mask_made(model, run, path)
    return partial(_context, known, known.causal or made, names, type(module).__name__)


def _fixed_context(known: Context, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    return known


def _context(
    known: Context, made: bool, names: introspection.Names, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Context:
    given = introspection.bind_arguments(names, args, kwargs)
    mask, padding = given.get("attention_mask"), given.get(_PADDING)
    by_model = made and not (isinstance(mask, Tensor) and mask.dim() == 2)  # or by generate; blocks can read it
    refuse = introspection.CACHED if _has_state(names, given) else ""
    real = None if by_model else _as_bool(mask, kind)
    return replace(known, mask=real if padding is None else introspection.mask_from_padding(padding), refuse=refuse)


def _has_state(names: introspection.Names, given: Mapping[str, Any]) -> bool:
    """Return whether a recurrent model goes on from earlier tokens; blocks show caches of keys and values."""
    return introspection.continues(names, {name: given.get(name) for name in ("state", "cache_params")})


def _is_reversible(module: nn.Module) -> bool:
    """Return whether blocks run backwards in the backward pass, as in Reformer."""
    return any("_ReversibleFunction" in introspection.code_names(inner) for inner in module.modules())


def _is_mask_made(model: nn.Module, run: Run, path: str) -> bool:
    """Return whether a model around the owner makes its attention mask of the user's, as in PaliGemma."""
    module = model.get_submodule(path)
    around = [m for _, m in pretrained_ancestors(model, run.blocks[0][0]) if m is not module]
    makes = any("mask" in name for outer in around for name in introspection.code_names(outer))
    return makes or not takes_input(module)


def _layout(config: Any, block: nn.Module) -> Layout | None:
    """Return "sequence_first" for blocks that take (n, b, d), None for others."""
    first = config.model_type in _SEQUENCE_FIRST or axes.is_sequence_first(block)
    return "sequence_first" if first else None


def _has_streams(module: nn.Module) -> bool:
    """Return whether the blocks take several streams of each token in one sequence, as in the decoder of ProphetNet."""
    return isinstance(getattr(module, "ngram", None), int) and hasattr(module, "ngram_embeddings")


def _always_refused(module: nn.Module) -> str:
    return _REVERSED if _is_reversible(module) else _STREAMS if _has_streams(module) else ""


def _refusal(
    causal: bool, names: introspection.Names, always: str, made: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Context:
    if always:
        return Context(refuse=always)
    given = introspection.bind_arguments(names, args, kwargs)
    if _has_state(names, given):
        return Context(refuse=introspection.CACHED)
    mask = given.get("attention_mask")
    if not causal and isinstance(mask, Tensor) and mask.dim() > 2 and not _hides_only_padding(mask):
        return Context(refuse=_MADE_MASK if made else _OWN_MASK)
    packed = mask is None and _are_packed(given.get("position_ids"))  # with a mask, positions may start after padding
    return Context(refuse=_PACKED if packed else "")


def _hides_only_padding(mask: Tensor) -> bool:
    return not torch.compiler.is_compiling() and introspection.hides_only_padding(mask)


def _are_packed(position_ids: Any) -> bool:
    """Return whether positions start again within a row: transformers then hides documents from each other."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return False
    return bool((position_ids.diff(dim=-1) < 0).any())


def _block_context(
    number: int, prefix: int, causal: bool, names: introspection.Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Context:
    """Read the mask that the model made of the user's for its blocks, or none if all tokens are real."""
    given = introspection.bind_arguments(names, args, kwargs)
    caches = (given.get(name) for name in introspection.CACHES)
    cached = any(cache is not None and introspection.has_earlier_tokens(cache, number) for cache in caches)
    mask = given.get("attention_mask")
    seen = None if isinstance(mask, Tensor) and mask.dim() > 4 else introspection.keys_seen(mask)  # of windows
    hidden = next((value for value in given.values() if isinstance(value, Tensor)), None)
    if seen is not None and hidden is not None:
        seen = seen[:, : hidden.shape[1]]  # without cache entries that are not filled yet
    return Context(seen, prefix=prefix, causal=causal, refuse=introspection.CACHED if cached else "")


def _as_bool(mask: Any, kind: str) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        came = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"The attention_mask of {kind} must have shape (batch, tokens), with 1 for real tokens and 0 for padding; "
            f"got {came}. Pass the mask of the tokenizer; if a model around {kind} converts it, run {kind} by itself."
        )
    return mask.bool()


@contextlib.contextmanager
def _eager(model: nn.Module, path: str) -> Iterator[None]:
    """Use eager attention, which computes the maps; fused attention never forms them. MPNet must be asked for them."""
    found: list[Any] = [getattr(m, "config", None) for m in model.get_submodule(path).modules()]
    settings = {id(config): implementation_of(config) for config in found if hasattr(config, IMPLEMENTATION)}
    before = [(holder, name, getattr(holder, name)) for holder, name in settings.values()]
    asked = [config for config in found[:1] if getattr(config, "model_type", "") == "mpnet"]
    before += [(config, "output_attentions", config.output_attentions) for config in asked]
    try:
        for holder, name, _ in before:
            setattr(holder, name, True if name == "output_attentions" else "eager")
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _reinitialize(model: nn.Module, path: str) -> nn.Module:
    """Return a copy whose part at `path`, a transformers model, has the weights of a new one."""
    part = model.get_submodule(path)
    name = type(part).__name__
    new = _new(part).state_dict()
    copied = copy.deepcopy(model, _stand_ins(part, new)).eval()
    try:  # extra weights of the new one, such as a pooler or removed layers, do not matter
        missing, _ = copied.get_submodule(path).load_state_dict(new, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{name} has no random baseline: its weights do not match its config. {error}") from error
    missing = [name for name in missing if not is_of_cure(name)]
    if missing:
        raise ValueError(
            f"{name} has no random baseline: a new model of its config lacks {len(missing)} of its weights, such as "
            f"{missing[0]}. Remove what was added to it, such as adapters."
        )
    reset_cures(copied)
    return copied


def _stand_ins(part: nn.Module, new: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return a memo for `deepcopy` with which the copy takes the new weights, rather than copies of the old ones."""
    old = {name: weight for name, weight in part.named_parameters() if type(weight) is nn.Parameter}
    alike = {name for name, weight in old.items() if name in new and _form(weight) == _form(new[name])}
    return {id(old[name]): nn.Parameter(new[name], requires_grad=old[name].requires_grad) for name in alike}


def _form(weight: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return weight.shape, weight.dtype, weight.device


def _new(part: Any) -> nn.Module:
    name = type(part).__name__
    check_not_quantized(part)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(SEED)  # torch.manual_seed would reset other devices as well
            new: nn.Module = type(part)(copy.deepcopy(part.config))
    except TypeError as error:
        raise ValueError(f"{name} has no random baseline: its class needs more than a config. {error}") from error
    return new
