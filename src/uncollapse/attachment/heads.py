"""Cures that act on attention, seen through what it makes of the values."""

from torch import Tensor, nn

from uncollapse.attachment.calls import Frame
from uncollapse.attachment.writers import Writer
from uncollapse.backbones.sites import Context, Values, fitted


class ValueReader:
    """Keeps what the module that computes the values of a block gives."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def __call__(self, x: Tensor) -> Tensor:
        """The same tensor."""
        self.frame.values = x
        return x


class HeadWriter(Writer):
    """A cure between the heads of an attention and its projection.

    Args:
        cure: takes the context of each head and its values.
        frame: of the block.
        values: where they are.
        calls: in which calls of the block, None for all.
        causal: tokens see earlier ones only, also where the context does not say so.
    """

    def __init__(
        self, cure: nn.Module, frame: Frame, values: Values, calls: frozenset[int] | None, causal: bool
    ) -> None:
        super().__init__(cure, frame, "tokens", ("mask", "causal"), calls=calls, causal=causal)
        self.values = values

    def changed(self, x: Tensor, context: Context) -> Tensor:
        """The heads (b, n, heads·d) side by side, as the projection takes them."""
        if self.frame.values is None:
            raise RuntimeError(f"{self.values.path} did not run before the projection of its attention.")
        heads, repeats = self.values.heads, self.values.repeats
        v = _split(self.frame.values[..., self.values.first :], heads)  # (b, heads, n, d)
        v = v.repeat_interleave(repeats, -3) if repeats > 1 else v
        new: Tensor = self.cure(
            _split(x, heads * repeats), v, fitted(context.mask, x), causal=self.causal or context.causal
        )
        return new.transpose(-2, -3).reshape(x.shape)


def _split(x: Tensor, heads: int) -> Tensor:
    """(b, n, heads·d) -> (b, heads, n, d)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-2, -3)
