"""Make torchvision importable where its compiled operators do not load.

A torchvision built for another torch than the installed one (such as its CUDA build with a CPU-only torch) cannot load
its compiled operators. It registers two of them while it is imported, so `import torchvision` fails, and with it every
vision model of transformers and timm, none of which needs these operators.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import torch

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_library: Any = None  # the operators live as long as this does


def declare() -> None:
    """Declare the operators that torchvision expects, without a body; call it before importing transformers or timm.

    Nothing happens if torchvision is absent or loads by itself, nor at a second call. Calling a declared operator is
    an error as before: only its name is known.
    """
    global _library
    if _library is not None or find_spec("torchvision") is None or _loads():
        return
    new: Any = torch.library.Library
    _library = new("torchvision", "DEF")
    for operator in _OPERATORS:
        _library.define(f"{operator}{_SIGNATURE}")


def is_declared() -> bool:
    """Return whether `declare` had something to do."""
    return _library is not None


def _loads() -> bool:
    """Return whether torchvision can be imported, or fails for a reason that is not ours to fix."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        return "operator torchvision::" not in str(error)
    except (ImportError, OSError):
        return True
    return True
