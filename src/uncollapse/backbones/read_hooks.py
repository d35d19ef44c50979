"""Hooks that read the sites of a model while it runs, and the context of the tokens there."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from uncollapse.backbones import forward
from uncollapse.backbones.nested import describe
from uncollapse.backbones.sites import Context, Site, Stack

OnTensor = Callable[[Site, int, Tensor], None]


class SiteReader:
    """Reads the tensors at some sites of a stack, inside `with reader:`; afterwards no hook is left.

    Recomputation by gradient checkpointing during a backward pass is not reported, nor are copies of the model. A
    reader of inspections reports only the thread that opened it: a pass in another thread is not the inspected one.

    Args:
        model: the model that has the stack.
        stack: its blocks.
        sites: which to read.
        receive: called with a site, the number of this call of it since the pass began, and the tensor.
        begin: called when a pass of the stack begins.
        inspections: also report passes in which a model is only inspected, as by `diagnose`.
    """

    def __init__(
        self,
        model: nn.Module,
        stack: Stack,
        sites: Iterable[Site],
        receive: OnTensor,
        begin: Callable[[], None] = lambda: None,
        inspections: bool = True,
    ) -> None:
        self.model, self.stack, self.sites = model, stack, list(dict.fromkeys(sites))
        self.context = Context()  # of the tokens of this pass
        self.graphs: Tensor | None = None  # the graph of each node, where the model itself does not take it
        self.passes = 0  # of the owner, since the reader was opened
        self.inside = False  # the owner runs; a wrapper may call one of its methods instead, which no hook sees
        self._outer = Context()  # of a module around the owner
        self._receive, self._pass_begins, self._inspections = receive, begin, inspections
        self._calls: Counter[int] = Counter()
        self._before_padding: Tensor | None = None  # the mask of the owner, where blocks take more tokens
        self._hooks = ExitStack()
        self._thread = 0  # in which it was opened

    def __enter__(self) -> "SiteReader":
        self._thread = threading.get_ident()
        self._calls.clear()
        self.passes = 0
        self.context = self._read_context()
        with ExitStack() as hooks:  # if a later step fails, earlier ones are undone
            hooks.enter_context(self.stack.under_hooks(self.model))
            owner = self.model.get_submodule(self.stack.path)
            first = self.model.get_submodule(self.stack.blocks[0].path)
            if self.stack.outer is not None:
                around, read = self.model.get_submodule(self.stack.outer[0]), self.stack.outer[1]
                hooks.callback(self._before(around, lambda args, kwargs: self._set_outer(read(args, kwargs))).remove)
                hooks.callback(self._after(around, lambda *call: self._set_outer(Context()), always=True).remove)
            hooks.callback(self._before(owner, self._begin).remove)
            hooks.callback(self._after(owner, self._end, always=True).remove)
            hooks.callback(self._before(first, self._fill).remove)
            for number, site in enumerate(self.sites):
                hooks.callback(self._at(number, site).remove)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _read_context(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Context:
        graphs = Context(batch=self.graphs if self.stack.layout == "nodes" else None)
        return self.stack.context(args, kwargs or {}).fill_from(self._outer).fill_from(graphs)

    def _set_outer(self, context: Context) -> None:
        self._outer = context

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.passes += 1
        self.inside, self.context, self._before_padding = True, self._read_context(args, kwargs), None
        self._calls.clear()
        self._pass_begins()

    def _end(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        self.inside = False

    def _fill(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self.inside:  # the mask of an earlier pass is not that of this one
            self.context = self._read_context()
        own = self.stack.blocks[0].context(args, kwargs)
        if own.mask is not None and self.context.mask is not None and own.mask.shape != self.context.mask.shape:
            self._before_padding = self.context.mask
            self.context = replace(self.context, mask=own.mask)  # padded to whole windows, as in Longformer
        elif self.context.mask is None:
            self.context = self.context.fill_from(own)

    def _at(self, number: int, site: Site) -> RemovableHandle:
        module = self.model.get_submodule(site.path)

        def report(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any = None) -> None:
            if site.side == "output" and site.what == "tokens":
                check_one_kind(site.path, output)
            if site == self.stack.final and self._before_padding is not None:  # which ends before it, as in Pegasus-X
                self.context = replace(self.context, mask=self._before_padding)
            x, call = site.read((args, kwargs), output), self._calls[number]
            self._calls[number] = call + 1
            if x is not None:
                self._receive(site, call, x)
            elif site.what == "tokens" and site != self.stack.embed:  # ids may enter the first block
                raise ValueError(_no_tokens(site, (*args, kwargs) if site.side == "input" else output))

        return self._before(module, report) if site.side == "input" else self._after(module, report)

    def _is_reported(self) -> bool:
        if _is_backward():
            return False
        return threading.get_ident() == self._thread if self._inspections else not forward.is_inspecting()

    def _before(self, watched: nn.Module, act: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> RemovableHandle:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is watched and self._is_reported():  # a deep copy of the model has the same hooks
                act(args, kwargs)

        return watched.register_forward_pre_hook(hook, with_kwargs=True)

    def _after(
        self,
        watched: nn.Module,
        act: Callable[[tuple[Any, ...], Mapping[str, Any], Any], None],
        *,
        always: bool = False,
    ) -> RemovableHandle:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module is watched and self._is_reported():
                act(args, kwargs, output)

        return watched.register_forward_hook(hook, with_kwargs=True, always_call=always)


def check_one_kind(path: str, output: Any) -> None:
    """Raise if a module returns a dictionary of several kinds of nodes, as `HeteroConv` does."""
    if (
        type(output) is dict
        and len(output) > 1
        and all(isinstance(x, Tensor) and x.dim() == 2 for x in output.values())
    ):
        raise ValueError(
            f"{path} returns {describe(output)}: kinds of nodes that must not be compared with each other. "
            "Measure one kind: collect its tensors after each layer and pass them to diagnose_activations."
        )


def _no_tokens(site: Site, value: Any) -> str:
    """Return that a site was read in vain, and what there was."""
    got = "took" if site.side == "input" else "returned"
    return (
        f"{site.path or 'The model'} {got} {describe(value)}, and no tokens: expected a floating-point tensor of two "
        "or more dimensions, alone or in a tuple, a list, a mapping or a dataclass. Leave this module out, or name one "
        "inside it whose output is such a tensor."
    )


def _is_backward() -> bool:
    """Return whether gradient checkpointing is recomputing a part of the model."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
