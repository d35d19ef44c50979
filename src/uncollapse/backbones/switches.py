"""Switch parts of all blocks off, or change them, for one pass: mixing, attention, MLP and residual.

A switch consists of forward hooks that an `ExitStack` removes, also after an error or Ctrl-C. Weights, buffers and
settings are never written.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from uncollapse.backbones.introspection import argument_names, bind_arguments
from uncollapse.backbones.nested import get_nested, set_nested
from uncollapse.backbones.sites import (
    Block,
    Context,
    Site,
    Stack,
    Values,
    find_tokens,
    fit_mask,
    from_sets,
    to_sets,
    without_masks,
)
from uncollapse.pairwise.numerics import csr_matrix

Change = Callable[[Tensor], Tensor]
EDGES = ("edge_index", "adj_t", "adj")
PER_EDGE = ("edge_weight", "edge_attr", "edge_type")


@dataclass(frozen=True)
class Branch:
    """A part of a block whose output is added to the residual stream, or would be if there were one.

    part: "attention", "cross", "mlp" or "convolution". output: what it computes. stream: what it adds that to.
    """

    part: str
    output: Site
    stream: Site


def branches(block: Block) -> tuple[Branch, ...]:
    """Return the branches of a block whose sites are known, in the order in which they run."""
    places = block.places
    if "conv.output" in places:
        return (Branch("convolution", places["conv.output"], Site(places["conv.output"].path, "input")),)
    post_norm = "attention.norm" in places and "attention.norm.input" not in places
    stream, found = places.get("attention.input"), []
    for part in ("attention", "cross", "mlp"):
        if f"{part}.output" in places and stream is not None:
            found.append(Branch(part, places[f"{part}.output"], stream))
            stream = places.get(f"{part}.norm" if post_norm else f"{part}.residual")
    return tuple(found)


class Switchboard:
    """The switches of a model. Those that are called inside `with table:` act until its end, and leave nothing.

    `acted` counts the changed tensors: 0 after a pass means that the part is not known, or did not run.

    Args:
        model: a model with this stack.
        stack: its blocks.
        context: returns the mask and other context of the running pass.
        seed: of the noise.
    """

    def __init__(self, model: nn.Module, stack: Stack, context: Callable[[], Context] = Context, seed: int = 0) -> None:
        self.model, self.stack, self.context = model, stack, context
        self.acted = 0
        self._random = torch.Generator().manual_seed(seed)
        self._hooks = ExitStack()

    def __enter__(self) -> "Switchboard":
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def uniform_attention(self) -> None:
        """Let each token attend to all tokens that it may see alike."""
        self._mix(self._mean)

    def stop_mixing(self) -> None:
        """Let each token attend to itself alone, and each node see no neighbor."""
        self._mix(lambda v: v)
        for path in dict.fromkeys(b.path for b in self.stack.blocks if "conv.output" in b.places):
            conv = self.model.get_submodule(path)
            self._add(conv.register_forward_pre_hook(self._isolate_nodes, with_kwargs=True))

    def stop_mlp(self) -> None:
        """Let every MLP add nothing."""
        for branch in self._branches():
            if branch.part == "mlp":
                self._write(branch.output, torch.zeros_like)

    def double_residual(self) -> None:
        """Let the residual count twice in every sum: each branch adds half of what it computes."""
        for branch in self._branches():
            self._write(branch.output, lambda f: f / 2)

    def add_residual(self) -> None:
        """Add what enters each branch to what it computes, where both have one shape."""
        for branch in self._branches():
            self._write(branch.output, partial(_add, self._hold(branch.stream)))

    def noise(self, like: Literal["branch", "stream"]) -> None:
        """Replace what each branch computes by noise, as large as it or as the stream that it is added to."""
        for branch in self._branches():
            held = self._hold(branch.stream) if like == "stream" else _Held()
            self._write(branch.output, partial(self._noise, held))

    def _branches(self) -> list[Branch]:
        """Return all branches; those of blocks that share their weights once."""
        return list(dict.fromkeys(branch for block in self.stack.blocks for branch in branches(block)))

    def _add(self, hook: RemovableHandle) -> None:
        self._hooks.callback(hook.remove)

    def _hold(self, site: Site) -> "_Held":
        held = _Held()
        self._add(_hook(self.model, site, held.hold))
        return held

    def _write(self, site: Site, change: Change) -> None:
        self._add(_hook(self.model, site, partial(self._count, change)))

    def _count(self, change: Change, x: Tensor) -> Tensor:
        self.acted += 1
        return change(x)

    def _noise(self, held: "_Held", f: Tensor) -> Tensor:
        stream = held.take()
        rms = _rms(f if stream is None else stream)
        return torch.randn(f.shape, generator=self._random).to(f) * (rms or 1.0)

    def _mix(self, mix: Change) -> None:
        """Replace the context of attention by a function of its values (b, n, d), where they are known."""
        for block in {block.path: block for block in self.stack.blocks}.values():
            site = block.places.get("attention.context")
            own = None if block.attention is None else self.model.get_submodule(block.attention.path)
            if site is not None and block.values is not None:
                held = self._hold(Site(block.values.path))
                self._write(site, partial(_mix_heads, mix, held, block.values))
            elif isinstance(own, nn.MultiheadAttention):
                self._add(own.register_forward_hook(partial(self._mix_torch, mix), with_kwargs=True))

    def _mix_torch(
        self, mix: Change, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> tuple[Any, ...]:
        """Return the output of `nn.MultiheadAttention`, from its values instead of its context."""
        self.acted += 1
        value, layout = bind_arguments(argument_names(module), args, kwargs)["value"], self.stack.layout
        own, begin = module.in_proj_weight, 2 * module.embed_dim
        weight = module.v_proj_weight if own is None else own[begin:]
        v = F.linear(value, weight, None if module.in_proj_bias is None else module.in_proj_bias[begin:])
        mixed = from_sets(mix(to_sets(v, layout)), v, layout)
        return (F.linear(mixed, module.out_proj.weight, module.out_proj.bias), *output[1:])

    def _mean(self, v: Tensor) -> Tensor:
        """Return the mean value (b, n, d) over the real tokens, or for a causal model over those so far."""
        context = self.context()
        mask = fit_mask(context.mask, v)
        real = v.new_ones(v.shape[:2]) if mask is None else mask.to(v)
        if context.causal:
            return (v * real[..., None]).cumsum(1) / real.cumsum(1).clamp(min=1)[..., None]
        mean = (v * real[..., None]).sum(1, keepdim=True) / real.sum(1).clamp(min=1)[:, None, None]
        return mean.expand_as(v)

    def _isolate_nodes(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the graph among the arguments of a convolution by one in which each node has only itself."""
        given = bind_arguments(argument_names(module), args, kwargs)
        name = next((name for name in EDGES if isinstance(given.get(name), Tensor)), None)
        x = given.get("x")
        if name is None or not isinstance(x, Tensor):
            raise ValueError(f"the graph of {type(module).__name__} is not among its arguments as a tensor")
        self.acted += 1
        given[name] = _self_loops(given[name], len(x))
        for other in PER_EDGE:
            if isinstance(given.get(other), Tensor):
                given[other] = given[other][:1].expand(len(x), *given[other].shape[1:])
        return (), given


class _Held:
    """The tensor at one site, held for another site of the same pass."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def hold(self, x: Tensor) -> Tensor:
        """Hold the tensor, and return it."""
        self.tensor = x
        return x

    def take(self) -> Tensor | None:
        """Return the tensor, once."""
        x, self.tensor = self.tensor, None
        return x


def _add(held: _Held, f: Tensor) -> Tensor:
    """Return the sum with the held tensor, if it has the same shape."""
    x = held.take()
    return f if x is None or x.shape != f.shape else f + x


def _mix_heads(mix: Change, held: _Held, values: Values, x: Tensor) -> Tensor:
    """Return what enters the projection of attention (b, n, heads·d), from the values instead."""
    v = held.take()
    if v is None:
        raise ValueError("the values of attention did not run before its projection")
    heads = torch.unflatten(v[..., values.first :], -1, (values.heads, -1))
    v = heads.repeat_interleave(values.repeats, -2).flatten(-2)
    if v.shape != x.shape:
        raise ValueError(f"the values of attention have shape {tuple(v.shape)}, its context {tuple(x.shape)}")
    return mix(v)


def _self_loops(edges: Tensor, nodes: int) -> Tensor:
    """Return the graph of `nodes` nodes with self-loops only, of the same kind as another graph."""
    own = torch.arange(nodes, device=edges.device)
    if edges.layout == torch.strided:
        return own.repeat(2, 1)
    values = torch.ones(nodes, device=edges.device, dtype=edges.dtype)
    csr = csr_matrix(torch.arange(nodes + 1, device=edges.device), own, values, (nodes, nodes))
    return csr if edges.layout == torch.sparse_csr else csr.to_sparse(layout=edges.layout)


def _rms(x: Tensor) -> float:
    x = x.detach() if x.layout == torch.strided else x.detach().values()
    return float(x.float().square().mean().sqrt())


def _hook(model: nn.Module, site: Site, change: Change) -> RemovableHandle:
    """Hook a site so that its tensor is changed. A function that returns the same tensor only reads it."""
    module = model.get_submodule(site.path)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keys = find_tokens(without_masks((args, kwargs)))
        return (args, kwargs) if keys is None else _set((args, kwargs), keys, change)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        keys = find_tokens(output)
        return output if keys is None else _set(output, keys, change)

    if site.side == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after, with_kwargs=True)


def _set(value: Any, keys: tuple[Any, ...], change: Change) -> Any:
    return set_nested(value, keys, change(get_nested(value, keys)))
