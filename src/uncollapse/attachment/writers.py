"""Cures at places: they change the tokens that pass."""

from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.attachment.calls import Frame
from uncollapse.backbones.sites import Context, Layout, fitted, known_layout, laid_back, sets_of


class Writer:
    """A cure at one place.

    Args:
        cure: the module that changes tokens.
        frame: of the block.
        layout: how the tokens lie.
        takes: which of mask, causal, edge_index and batch the cure takes.
        inside: whether the place is within the block; else right behind it.
        calls: in which calls of the block, None for all.
        patches: leaves CLS and other prefix tokens as they are.
        counts_padding: the cure is not told which tokens are padding.
        causal: tokens see earlier ones only, also where the context does not say so.
    """

    def __init__(
        self,
        cure: nn.Module,
        frame: Frame,
        layout: Layout,
        takes: tuple[str, ...],
        *,
        inside: bool = True,
        calls: frozenset[int] | None = None,
        patches: bool = False,
        counts_padding: bool = False,
        causal: bool = False,
    ) -> None:
        self.cure, self.frame, self.layout, self.takes = cure, frame, layout, takes
        self.inside, self.calls, self.patches, self.causal = inside, calls, patches, causal
        self.counts_padding = counts_padding

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the cure."""
        context = self.frame.told(self.inside)
        if self.calls is not None and self.frame.call not in self.calls:
            return x
        new = self.changed(x, context)
        if new.shape != x.shape:
            raise ValueError(f"The cure at {self.frame.name} made {tuple(new.shape)} of {tuple(x.shape)}.")
        return new

    def changed(self, x: Tensor, context: Context) -> Tensor:
        """The tokens, laid out for the cure and back."""
        if self.layout == "nodes":
            graph = {"edge_index": context.edge_index, "batch": context.batch}
            traced = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
            if traced and context.batch is not None and "batch" in self.takes:
                raise RuntimeError(
                    "A cure that tells the graphs of a batch apart is exported by torch.export.export(…, strict=True) "
                    "only: how many graphs there are is not known before it runs."
                )
            return self._cured(x, **graph)
        sets = sets_of(x, self.layout)
        is_blind = self.counts_padding or known_layout(self.layout, x) == "vectors"
        mask = None if is_blind else fitted(context.mask, sets)
        skip = context.prefix if self.patches else 0
        new = self._cured(
            sets[:, skip:], mask=None if mask is None else mask[:, skip:], causal=self.causal or context.causal
        )
        return laid_back(new if skip == 0 else torch.cat([sets[:, :skip], new], 1), x, self.layout)

    def _cured(self, x: Tensor, **context: Any) -> Tensor:
        told = {name: value for name, value in context.items() if value is not None and value is not False}
        blind = [name for name in told if name in ("mask", "causal") and name not in self.takes]
        if blind:
            raise RuntimeError(
                f"{type(self.cure).__name__} at {self.frame.name} takes no {blind[0]}, and would read tokens that it "
                f"must not see: {'padding' if blind[0] == 'mask' else 'later ones'}. Give its forward that argument."
            )
        new: Tensor = self.cure(x, **{name: value for name, value in told.items() if name in self.takes})
        return new


class StreamWriter(Writer):
    """A cure on the residual stream in front of a module that only looks at it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the cure; the change goes into the stream as well."""
        new = super().__call__(x)
        carried = self.frame.carried
        self.frame.carried = new - x if carried is None else carried + (new - x)
        return new


class Receiver:
    """A later look of the block at the residual stream, or its end: what was changed before is added."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.users = frame, 0

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the change."""
        return x if self.frame.carried is None else x + self.frame.carried
