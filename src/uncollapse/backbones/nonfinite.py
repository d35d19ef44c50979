"""Find the first module of a model whose numbers are not finite, in one pass that checks every module.

It runs only after something has failed, so its cost does not matter.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Cause = Literal["batch", "weights", "input", "output"]
HALF = 65_504  # the largest finite number of float16


@dataclass(frozen=True)
class Fault:
    """The first tensor that is not finite.

    path, kind: the module, "" for the model itself. cause: "batch" is the input of the model, "weights" are the
    module's own, "input" was computed before it outside of any module, "output" is its own result on finite numbers.
    what: the name of a weight. nan, infinite, entries: counts. dtype: of the tensor.
    """

    path: str
    kind: str
    cause: Cause
    nan: int
    infinite: int
    entries: int
    dtype: torch.dtype
    what: str = ""

    def __str__(self) -> str:
        where = f"{self.path} ({self.kind})" if self.path else f"the model ({self.kind})"
        number = describe_counts(self.nan, self.infinite, self.entries)
        if self.cause == "batch":
            return f"The batch itself holds {number}."
        if self.cause == "weights":
            return f"It begins at {where}: its {self.what} holds {number}."
        side = "its input holds" if self.cause == "input" else "from finite inputs it computes"
        return f"It begins at {where}: {side} {number}{self._explain()}."

    def _explain(self) -> str:
        if self.dtype != torch.float16:
            return ""
        surely = "" if self.infinite else "probably "
        return f": {surely}a float16 overflow (largest finite number {HALF:,}); run it in bfloat16 or float32"


def describe_counts(nan: int, infinite: int, entries: int) -> str:
    """Return how many numbers are not finite, in words.

    >>> describe_counts(2, 0, 4096), describe_counts(3, 1, 10)
    ('2 NaN among 4,096 numbers', '3 NaN and 1 infinite among 10 numbers')
    """
    parts = [f"{count:,} {word}" for count, word in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(parts)} among {entries:,} numbers"


def count_nonfinite(x: Tensor) -> tuple[int, int, int]:
    """Return the number of NaN, of infinite numbers and of all entries of a tensor."""
    return int(x.isnan().sum()), int(x.isinf().sum()), x.numel()


def first_fault(model: nn.Module, run: Callable[[], Any]) -> Fault | None:
    """Run something that calls the model, and return where the first number that is not finite came from.

    Negative infinity that is gone after the next module is a mask, not a fault.

    Args:
        model: the model that `run` calls.
        run: one pass, such as the one that failed. An exception in it ends the search and is not raised.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> _ = nn.init.constant_(model[0].bias, float("nan"))
    >>> print(first_fault(model, lambda: model(torch.ones(2, 4))))
    It begins at 0 (Linear): its bias holds 4 NaN among 4 numbers.
    """
    search = _Search()
    with ExitStack() as hooks, torch.no_grad():
        for path, module in model.named_modules():
            for hook in search.hooks(path, module):
                hooks.callback(hook.remove)
        with suppress(Exception):  # it failed before; what matters is where
            run()
    return search.found or search.doubtful


class _Search:
    """What hooks have found in a pass. doubtful: only negative infinity so far."""

    def __init__(self) -> None:
        self.found: Fault | None = None
        self.doubtful: Fault | None = None

    def hooks(self, path: str, module: nn.Module) -> Iterator[Any]:
        """Register hooks that check what enters and what leaves a module."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {name: value for name, value in kwargs.items() if "mask" not in name}
            self._check(path, module, "input" if path else "batch", (args, given))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._check(path, module, "output", output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after, with_kwargs=True)

    def _check(self, path: str, module: nn.Module, cause: Cause, value: Any) -> None:
        if self.found is not None:
            return
        bad = next((x for x in _tensors(value) if not bool(x.isfinite().all())), None)
        if bad is None:
            self.doubtful = self.doubtful if cause in ("input", "batch") else None
            return
        fault = _in_weights(path, module) if cause == "output" else None
        fault = fault or Fault(path, type(module).__name__, cause, *count_nonfinite(bad), bad.dtype)
        if bool((bad == -torch.inf).logical_or(bad.isfinite()).all()):
            self.doubtful = self.doubtful or fault
        else:
            self.found = self.doubtful or fault


def _in_weights(path: str, module: nn.Module) -> Fault | None:
    """Return the first of a module's own weights that is not finite. Sharded weights are not checked."""
    for name, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()
        if plain and not bool(weight.isfinite().all()):
            return Fault(path, type(module).__name__, "weights", *count_nonfinite(weight), weight.dtype, name)
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested containers, and the nodes of a graph."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "edge_index"):
        yield from _tensors(getattr(value, "x", None))
