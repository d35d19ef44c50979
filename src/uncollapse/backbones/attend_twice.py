"""Attention of transformers that applies its map A twice, A(Av), with the model's own attention function.

Attention modules look their function up by a name in their config. While a cure needs A(Av), a module has a copy of the
config with another name; the config of the model, and what is saved of it, stay as they are.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

IMPLEMENTATION = "_attn_implementation_internal"  # the public name also changes the configs of other towers
NAME, HOLDER = "uncollapse_twice", "uncollapse_twice"  # of the registered function; of the config's attribute


def attend_twice(module: nn.Module, receive: Callable[[Tensor], Tensor]) -> Any:
    """Return a config for an attention module with which it calls `receive` with A(Av) (b, heads, n, d)."""
    config: Any = copy.copy(module.config)
    setattr(config, HOLDER, Twice(getattr(config, IMPLEMENTATION), receive))
    setattr(config, IMPLEMENTATION, NAME)
    return config


def implementation_of(config: Any) -> tuple[Any, str]:
    """Return the object and the name of its attribute where the name of the model's own attention function is."""
    return (getattr(config, HOLDER), "plain") if hasattr(config, HOLDER) else (config, IMPLEMENTATION)


class Twice:
    """An attention function of transformers that runs another one twice.

    Args:
        plain: name of the other.
        receive: called with A(Av).
    """

    def __init__(self, plain: str, receive: Callable[[Tensor], Tensor]) -> None:
        self.plain, self.receive = plain, receive
        _register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register()  # this may be another process

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return Av (b, n, heads, d), and A if the plain function returns it."""
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        plain: Any = _functions().get_interface(self.plain, own)
        output, maps = plain(module, query, key, value, *args, **options)
        context, repeats = output.transpose(1, 2), query.shape[1] // value.shape[1]
        # Query heads that share keys have contexts of their own: each of them in turn stands in for the values.
        parts = [plain(module, query, key, context[:, n::repeats], *args, **options)[0] for n in range(repeats)]
        own_heads = [part.transpose(1, 2)[:, n::repeats] for n, part in enumerate(parts)]
        self.receive(torch.stack(own_heads, 2).flatten(1, 2))
        return output, maps


def _attend(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Run the function that the config of an attention module holds."""
    twice: Twice = getattr(module.config, HOLDER)
    return twice(module, *args, **options)


def _functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


def _register() -> None:
    if NAME not in _functions():
        _functions().register(NAME, _attend)
