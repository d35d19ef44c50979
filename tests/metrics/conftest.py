"""What tests of memory look at: how large tensors get, and what autograd keeps."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Sizes:
    """Elements of the largest tensor that an operator returned, and bytes of all memory that autograd kept."""

    largest: int = 0
    kept: int = 0


class _Watch(TorchDispatchMode):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.sizes.largest = max(self.sizes.largest, tensor.numel())
        return out


@contextmanager
def _watched() -> Iterator[Sizes]:
    sizes, seen = Sizes(), set()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:  # many views of one tensor take its memory once
            seen.add(storage.data_ptr())
            sizes.kept += storage.nbytes()
        return tensor

    with _Watch(sizes), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


@pytest.fixture
def watched() -> AbstractContextManager[Sizes]:
    return _watched()
