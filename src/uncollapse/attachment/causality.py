"""Find out whether a model is causal, so that a cure does not show tokens the later ones.

A probe runs copies of the model: as it is, with another last token, and with another first token. The tokens are
changed where they enter the first block, so any kind of input will do.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones import forward
from uncollapse.backbones.nested import find_tensor, get_nested, set_nested
from uncollapse.backbones.sites import (
    CHILD,
    HOOKS,
    OUTPUT,
    Layout,
    Site,
    Stack,
    find_tokens,
    fit_mask,
    from_sets,
    is_tokens,
    resolve_layout,
    to_sets,
    without_masks,
)

HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SMALL = 1e-3  # of the change that an earlier token makes: what a later one may make by rounding in a causal model
REMEDY = "Pass causal=True or causal=False to attach"


class Causality:
    """Whether the tokens of a stack see earlier ones only: known, or found out when the model first runs.

    Args:
        causal: None if it is not known.
        stack: the blocks.
    """

    def __init__(self, causal: bool | None, stack: Stack) -> None:
        self.causal, self.stack = causal, stack
        self.is_open = causal is None  # a probe may find out
        self.is_compiled = False  # a call of the owner could not be probed
        self.warned = causal is not None  # there is nothing to report
        self.problem = f"it runs outside of a forward pass of {stack.architecture}"

    def probe(self, owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Find out by the arguments of a call of the owner. A single token shows nothing: the next call is tried."""
        if self.is_open and torch.compiler.is_compiling():
            self.is_compiled = True
        if not self.is_open or torch.compiler.is_compiling():
            return
        try:
            found = _Probe(owner, self.stack, args, kwargs)
            self.causal = found.is_causal()
            self.is_open = self.causal is None and found.count == 1
            self.problem = "no token was seen to depend on another one"
        except Exception as error:  # of the user's model
            self.is_open = False
            self.problem = f"a trial run failed with {type(error).__name__}: {error}".rstrip(".")

    def hides_later(self, told: bool, x: Tensor) -> bool:
        """Return whether a cure must not read later tokens. told: the arguments of this call say so. x: (b, n, d)."""
        if told or self.causal is not None:
            if self.causal and not told:
                self.remark()
            return told or bool(self.causal)
        if self.is_open and (self.is_compiled or torch.compiler.is_compiling()):
            raise RuntimeError(
                f"Whether {self.stack.architecture} is causal is not known, and compiled code cannot be probed. "
                f"{REMEDY}, or run the model once before you compile it."
            )
        if x.shape[-2] > 1:
            self._warn(
                f"The trial could not determine whether {self.stack.architecture} is causal: {self.problem}. The cure "
                f"lets every token see later ones. {REMEDY}."
            )
        return False

    def remark(self) -> None:
        """Report once that the model was found to be causal."""
        self._warn(
            f"{self.stack.architecture} was found to be causal: no token depends on a later one. The cure acts with "
            "causal=True; pass that to attach, or causal=False if tokens may see later ones."
        )

    def _warn(self, message: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(message, stacklevel=4)


def find_causality(model: nn.Module, stack: Stack, mixes: bool, causal: bool | None) -> Causality:
    """Return what is known of a stack before it runs, after a trial on a few tokens if its owner takes token ids.

    Args:
        model: with the stack.
        stack: the blocks.
        mixes: whether the cure lets tokens depend on each other; otherwise nothing is to be found out.
        causal: what the user says.
    """
    owner: Any = model.get_submodule(stack.path)
    if causal is None and (stack.knows_causality or not mixes or stack.context((), {}).causal):
        causal = False  # beyond what the context of a call says
    found = Causality(causal, stack)
    if found.is_open and getattr(owner, "main_input_name", "") == "input_ids":
        device = next((p.device for p in owner.parameters()), torch.device("cpu"))
        found.probe(owner, (), {"input_ids": torch.arange(3, 11, device=device)[None]})
        if found.causal is None:  # the first call of the user may show it
            found.is_open = True
        elif found.causal:
            found.remark()
    return found


class _Probe:
    """Runs of copies of a stack's owner, with the same arguments but for one token.

    count: the number of tokens of a sequence; 0 if there are no sequences.
    """

    def __init__(self, owner: nn.Module, stack: Stack, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.owner, self.stack, self.given = owner, stack, (args, kwargs)
        cut = len(stack.path) + 1 if stack.path else 0
        self.sites = {block.path[cut:]: block.places[OUTPUT] for block in stack.blocks}
        self.layout: Layout = "tokens"  # of the tokens that were changed
        self.mask = stack.context(args, kwargs).mask
        self.count = 0
        self.position: int | None = None  # of the token to change: 0, −1 or none
        self.is_changed = False  # the tokens of this run
        self.changed: Tensor | None = None  # (b, n) bool: which tokens
        self.records: list[Tensor] = []

    def is_causal(self) -> bool | None:
        """Return whether no token depends on a later one; None if none is seen to depend on any other."""
        plain = self._run(None)
        if self.count < 2:  # vectors, images
            return False if self.is_changed and self.count == 0 else None
        by_later, by_earlier = (self._compare(plain, self._run(position)) for position in (-1, 0))
        if by_later == 0 == by_earlier:
            return None
        rounding = max(torch.finfo(record.dtype).eps for record in plain)
        return by_later <= min(rounding, SMALL * by_earlier)

    def _run(self, position: int | None) -> list[Tensor]:
        """Return the tokens after each block and those that the owner returns, with another token at a position."""
        self.position, self.records, self.is_changed = position, [], False
        model = _copy_without_hooks(self.owner)
        model.get_submodule(next(iter(self.sites))).register_forward_pre_hook(self._enter, with_kwargs=True)
        for path, site in self.sites.items():
            model.get_submodule(path).register_forward_hook(partial(self._leave, site))
        with forward.inspection_mode(model), self.stack.under_hooks(model):
            torch.default_generator.manual_seed(0)
            args, kwargs = _copy_arguments(self.given)
            self._record(model(*args, **kwargs))
        return self.records

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keys = find_tokens(without_masks((args, kwargs)))
        if keys is None or self.is_changed:
            return None
        own = self.stack.blocks[0].context(args, kwargs).mask
        if own is not None and (self.mask is None or own.shape != self.mask.shape):
            self.mask = own  # tokens are padded to whole windows, as in Pegasus-X
        return self._change((args, kwargs), keys, self.stack.embed)

    def _leave(self, site: Site, module: nn.Module, args: Any, output: Any) -> Any:
        keys = find_tokens(output)
        if keys is not None and not self.is_changed:  # the first block takes ids
            output = self._change(output, keys, site)
        self._record(output)
        return output

    def _change(self, value: Any, keys: tuple[Any, ...], site: Site | None) -> Any:
        """Replace one real token of each sequence in the tensor at these keys."""
        x = get_nested(value, keys)
        layout = resolve_layout(self.stack.layout, x, site.axes if site is not None and x.dim() == 3 else None)
        self.is_changed, self.layout = True, layout
        if layout in ("vectors", "nodes") or (layout in ("channels_first", "channels_last") and x.dim() > 3):
            return value
        sets = to_sets(x, layout)
        self.count = sets.shape[1]
        mask = fit_mask(self.mask, sets)
        real = torch.ones_like(sets[..., 0], dtype=torch.bool) if mask is None else mask.to(x.device)
        order = real.cumsum(1)
        self.changed = real & (order == (order[:, -1:] if self.position == -1 else 1))
        if self.position is None:
            return value
        new = torch.randn(sets.shape[-1], generator=torch.Generator().manual_seed(0)) * sets.float().std().clamp(1e-2)
        return set_nested(value, keys, from_sets(torch.where(self.changed[..., None], new.to(sets), sets), x, layout))

    def _record(self, output: Any) -> None:
        """Save the tokens of an output, if it has as many as were changed."""

        def fits(tensor: Tensor) -> bool:
            if self.changed is None or not is_tokens(tensor):  # of images nothing is changed
                return False
            if self.layout == "channels_first" and tensor.dim() < 3:
                return False
            return to_sets(tensor, self.layout).shape[:2] == self.changed.shape

        keys = find_tensor(output, fits)
        if keys is not None:
            self.records.append(to_sets(get_nested(output, keys), self.layout).clone())

    def _compare(self, plain: list[Tensor], other: list[Tensor]) -> float:
        """Return by how much the tokens that were not changed differ on average, relative to their size."""
        total = 0.0
        for a, b in zip(plain, other, strict=True):
            difference = (a.double() - b.double()).abs()[~self.changed]  # type: ignore[operator]
            total += float(difference.mean() / a.double().abs().mean().clamp(min=1e-30))
        return total / max(1, len(plain))


def _copy_without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy without hooks and cures, and with tensors without their graph."""
    done: dict[int, Any] = {}
    for inner in module.modules():
        done |= {id(getattr(inner, name)): OrderedDict() for name in HOOK_DICTS}
        done |= {
            id(value): None for value in (inner.__dict__.get(HOOKS), inner._modules.get(CHILD)) if value is not None
        }
        done |= {id(value): value.detach().clone() for value in inner.__dict__.values() if isinstance(value, Tensor)}
    return copy.deepcopy(module, done)


def _copy_arguments(given: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a copy of the arguments, such as caches, which a run may change; tensors without their graph."""
    values = [*given[0], *given[1].values()]
    values += [item for value in values if isinstance(value, tuple | list) for item in value]
    done: dict[int, Any] = {id(value): value.detach().clone() for value in values if isinstance(value, Tensor)}
    copied: tuple[tuple[Any, ...], dict[str, Any]] = copy.deepcopy((given[0], dict(given[1])), done)
    return copied
