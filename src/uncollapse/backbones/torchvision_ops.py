"""Let torchvision be imported where its compiled part does not load.

A torchvision built for another torch than the one installed (such as its CUDA build beside a CPU-only torch) cannot
load its compiled operators. It describes two of them while it is imported, so that `import torchvision` then ends in an
error, and with it that of every vision model of transformers and timm, none of which needs these operators.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import torch

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_library: Any = None  # the operators live as long as this does


def declare() -> None:
    """Declare the operators that torchvision asks for, without a body; to be called before transformers or timm.

    Nothing happens where torchvision is absent or loads by itself, nor at a second call. Calling a declared operator
    is an error as before: only its name is known.
    """
    global _library
    if _library is not None or find_spec("torchvision") is None or _loads():
        return
    new: Any = torch.library.Library
    _library = new("torchvision", "DEF")
    for operator in _OPERATORS:
        _library.define(f"{operator}{_SIGNATURE}")


def is_declared() -> bool:
    """Whether `declare` had something to do."""
    return _library is not None


def _loads() -> bool:
    """Whether torchvision can be imported, or fails for another reason, which those who need it will tell."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        return "operator torchvision::" not in str(error)
    except (ImportError, OSError):
        return True
    return True
