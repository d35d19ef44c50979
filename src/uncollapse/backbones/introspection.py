"""Read a module before it runs: the arguments and code of its forward pass, its widths, the meaning of masks."""

import dis
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from uncollapse.backbones.sites import Side

HIDDEN = -1e4  # what is added to a logit to take its key out; models use −inf, −1e9 or the least number of the dtype


CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
CACHED = (
    "earlier tokens are in a cache, which the cure cannot see; run the model with use_cache=False, as in "
    "model.generate(..., use_cache=False)"
)

Names = tuple[str, ...]


def argument_names(module: nn.Module) -> Names:
    """Return the names of the arguments of a module's forward pass, in order."""
    return tuple(
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def code_names(module: nn.Module) -> Names:
    """Return all names in the code of a module's forward pass, in the order of their first use."""
    forward: Callable[..., Any] | None = getattr(type(module), "forward", None)  # TorchScript has none
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
    return code.co_names if code is not None else ()


def count_uses(module: nn.Module, name: str) -> int:
    """Return how often the code of a module's forward pass uses a name."""
    forward: Callable[..., Any] | None = getattr(type(module), "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
    return 0 if code is None else sum(step.argval == name for step in dis.get_instructions(code))


def bind_arguments(names: Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> value of the arguments, including those of **kwargs."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def has_earlier_tokens(cache: Any, number: int) -> bool:
    """Return whether a block's cache is filled: with keys and values, or with the state of a recurrent layer."""
    layers = getattr(cache, "layers", ())
    states = getattr(layers[number], "has_previous_state", None) if number < len(layers) else None
    if isinstance(states, dict):
        return any(states.values())
    try:
        return bool(cache.get_seq_length(number) > 0)
    except (AttributeError, ValueError):  # a layer that has neither, such as an MLP in a hybrid model
        return bool(getattr(cache, "seqlen_offset", 0))  # of xLSTM


def continues(names: Names, given: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a model hold what it computed from earlier tokens: a cache, or RWKV's state.

    A model that takes `use_cache` makes its first state itself, so any that it is given is a later one.
    """
    if "use_cache" in names and given.get("state") is not None:
        return True
    caches = [given[name] for name in CACHES if given.get(name) is not None]
    return any(has_earlier_tokens(each, n) for each in caches for n in range(max(1, len(getattr(each, "layers", ())))))


def mask_from_padding(padding: Tensor | None) -> Tensor | None:
    """Return a torch padding mask (bool: True = padding; float: added to logits) as bool, True = real."""
    if padding is None:
        return None
    return padding > HIDDEN if padding.is_floating_point() else ~padding.bool()


def keys_seen(mask: Any) -> Tensor | None:
    """Return which keys (b, n) at least one query sees under an attention mask: those that are not padding.

    mask: (b, n) or (b, ..., n), see `is_seen`; or several of them by name, of which the first tensor counts.
    """
    if isinstance(mask, Mapping):  # as in Zaya: one for attention and one for convolutions
        mask = next((each for each in mask.values() if isinstance(each, Tensor)), None)
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"The padding cannot be read from an attention mask of type {type(mask).__name__}: expected a tensor. "
            "Load the model with another attention, such as attn_implementation='sdpa'."
        )
    seen = is_seen(mask)
    return seen.flatten(1, -2).any(1) if seen.dim() > 2 else seen


def is_seen(mask: Tensor) -> Tensor:
    """Return an attention mask as bool, True = seen.

    Bool or integers: True or 1 = seen; floating point: added to logits, or 1 = seen in a mask (b, n, n) of 0 and 1, as
    in CANINE.
    """
    if not mask.is_floating_point():
        return mask.bool()
    if mask.dim() == 3 and bool((mask == 1).any()) and bool(((mask == 0) | (mask == 1)).all()):
        return mask == 1
    return mask > HIDDEN


def hides_only_padding(mask: Tensor) -> bool:
    """Return whether all queries of an attention mask (b, ..., n, n) see the same keys, apart from padding."""
    seen = is_seen(mask)
    keys = seen.any(-2, keepdim=True)
    return bool((seen == keys).all(-1).logical_or(~seen.any(-1)).all())


PARTLY = (
    "the attention mask hides later tokens from some tokens but not from all, as in a prefix language model, and the "
    "cure handles only all or none"
)


def hides_some_later(mask: Any) -> bool:
    """Return whether an `nn.MultiheadAttention` mask (..., n, n), True = hidden, hides later tokens only."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    hidden = _hides(mask)
    return bool(hidden.triu(1).any()) and not bool(hidden.tril(-1).any())


def _hides(mask: Tensor) -> Tensor:
    return mask <= HIDDEN if mask.is_floating_point() else mask.bool()


def hides_later(mask: Tensor | None) -> bool:
    """Return whether an attention mask (..., n, n), True = seen or added to logits, hides every later token."""
    return is_causal(mask if mask is None or mask.is_floating_point() else ~mask.bool())


def is_causal(mask: Tensor | None) -> bool:
    """Return whether an `nn.MultiheadAttention` mask (..., n, n), True = hidden, hides every later token."""
    if mask is None or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] == 1:
        return False
    if not _hides(mask[..., 0, 1]).all():  # the first token sees the second: no need to check all pairs
        return False
    hidden = _hides(mask)
    later = hidden.new_ones(mask.shape[-2:]).triu(1)
    return bool((hidden | ~later).all())


def width(module: nn.Module, side: Side) -> int | None:
    """Return the number of features at one side of a linear layer, a convolution or a norm; None if not known."""
    owner: Any = module
    if isinstance(module, nn.Linear):
        return module.in_features if side == "input" else module.out_features
    if type(module).__name__ == "Conv1D":  # of transformers: a linear layer with the transposed weight
        return int(owner.weight.shape[0 if side == "input" else 1])
    channels = getattr(module, "in_channels" if side == "input" else "out_channels", None)
    if isinstance(channels, int) and channels > 0:  # convolutions, also of PyG, where −1 is for lazy ones
        heads = getattr(module, "heads", 1) if side == "output" and getattr(module, "concat", False) else 1
        return channels * heads
    weight = getattr(module, "weight", None)
    if "Norm" in type(module).__name__ and weight is not None and weight.dim() == 1:
        return int(weight.shape[0])
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else None


def block_width(module: nn.Module, side: Side) -> int | None:
    """Return the number of features at one side of a block: of its own, or what all norms in it agree on.

    The first or last linear layer or convolution at that side must agree as well. Of a Sequential, its first or last
    part that has a width counts.
    """
    own = width(module, side)
    if own is not None:
        return own
    if isinstance(module, nn.Sequential):
        parts = [*module] if side == "input" else [*module][::-1]
        return next((found for part in parts if (found := block_width(part, side)) is not None), None)
    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    norms = {found for part in leaves if "Norm" in type(part).__name__ and (found := width(part, side))}
    others = [found for part in leaves if "Norm" not in type(part).__name__ and (found := width(part, side))]
    end = others[:1] if side == "input" else others[-1:]
    return next(iter(norms)) if len(norms) == 1 and norms == set(end) else None
