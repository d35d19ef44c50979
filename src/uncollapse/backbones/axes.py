"""Tell from its modules how tensors at a place are laid out.

Images have their channels first (b, d, h, w) or last (b, h, w, d); tensors of three axes are (b, n, d), (n, b, d) or,
of convolutions over sequences, (b, d, n).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from uncollapse.backbones.introspection import code_names, width
from uncollapse.backbones.sites import CHILD, Axes, Layout, SequenceAxes, Side, join_path

FORMATS: dict[str, Layout] = {"NCHW": "channels_first", "NHWC": "channels_last"}  # timm's `output_fmt`
TO_FIRST, TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
FIRST = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.GroupNorm)
LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
ALONG = (nn.Conv1d, nn.ConvTranspose1d)  # over the last axis of (b, d, n)
# Where a module does this in its code, its parts need not see the image as it leaves the module.
POOLING = ("mean", "adaptive_avg_pool2d", "avg_pool2d")
SWAPPING = ("permute", "rearrange", "movedim", "transpose", "mT")
PERMUTING = (*SWAPPING, "unfold", "fold", "view", "reshape")
HIDING = (*POOLING, "permute", "rearrange", "movedim")

Evidence = tuple[Layout | None, tuple[int, ...]]  # the layout that a module needs, and its widths


def read_axes(modules: Mapping[str, nn.Module], path: str, side: Side) -> Axes:
    """Return what the modules at one side of the module at `path` say about images there.

    Its own parts come first. A module without parts that matter, such as an activation, has the axes of the last module
    listed before it that has some, or else of the next one after it.

    Args:
        modules: all modules of the model by their names.
        path: one of these names.
        side: its input or its output.
    """
    own, name = _format(modules[path]), f"the {side} of {path}"
    end, sequences = _end(modules[path], side), _read_sequences(modules, path)
    own = _permute_layout(end, side) or (own if side == "output" else None)
    if own is not None:
        return Axes(name, layout=own, sequences=sequences)
    found = _evidence(end) or _neighbours(modules, path)
    layouts, hidden = {layout for layout, _ in found}, _hides_axes(end)
    if layouts - {None} == {"channels_first"} and not hidden and _convolves(end, SWAPPING):
        return Axes(name, layout="channels_first", sequences=sequences)  # whatever its width, as where channels join
    layout = next(iter(layouts)) if len(layouts) == 1 and not hidden else None
    if layout is None and _convolves(end, PERMUTING):
        layout = "channels_first"
    widths = tuple(dict.fromkeys(size for _, sizes in found for size in sizes))
    features = _features(modules, path) if side == "output" else _enters(end)
    return Axes(name, widths, layout, _find_declared(modules, path), features, sequences)


def _read_sequences(modules: Mapping[str, nn.Module], path: str) -> SequenceAxes:
    """Return what a module says about tensors of three axes, or else the last one before it that says something."""
    names = list(modules)
    for name in [path, *names[: names.index(path)][::-1]]:
        inside = [part for inner, part in modules[name].named_modules() if CHILD not in inner.split(".")]
        found = _sequences(inside) if name == path or not any(True for _ in modules[name].children()) else None
        if found is not None:
            return found
    return SequenceAxes()


def is_sequence_first(block: nn.Module) -> bool:
    """Return whether a block takes (n, b, d): its attention does, and nothing in it swaps axes."""
    found = _sequences(list(block.modules()))
    return found is not None and found.sequence_first and not found.permutes


def _sequences(parts: list[nn.Module]) -> SequenceAxes | None:
    """Return what these modules say about tensors of three axes, None if nothing."""
    along = [part for part in parts if isinstance(part, ALONG)]
    last = [part for part in parts if isinstance(part, LAST) or type(part).__name__ == "Conv1D"]
    mixing: list[Any] = [part for part in parts if isinstance(part, nn.MultiheadAttention | nn.RNNBase)]
    if not (along or last or mixing):
        return None
    return SequenceAxes(
        _widths(along),
        (*_widths(last), *(size for part in mixing if (size := getattr(part, "embed_dim", 0) or _recurrent(part)))),
        _widths(part for part in last if "Norm" in type(part).__name__),
        any(name in PERMUTING for part in parts for name in _names_of(part)),
        any(not part.batch_first for part in mixing),
    )


def _widths(parts: Iterable[nn.Module]) -> tuple[int, ...]:
    sides: tuple[Side, Side] = ("input", "output")
    return tuple(dict.fromkeys(size for part in parts for side in sides if (size := width(part, side))))


def _recurrent(part: Any) -> int:
    """Return the number of features that leave a recurrent layer."""
    return int(part.proj_size or part.hidden_size) * (2 if part.bidirectional else 1)


def _end(module: nn.Module, side: Side) -> nn.Module:
    """Return the part of a Sequential at this side that says something about axes; another module as it is."""
    while isinstance(module, nn.Sequential):
        parts = [*module] if side == "input" else [*module][::-1]
        telling = next((part for part in parts if _evidence(part)), None)
        if telling is None:
            break
        module = telling
    return module


def _evidence(module: nn.Module) -> list[Evidence]:
    """Return what the parts of a module say about axes."""
    inner = (part for name, part in module.named_modules() if CHILD not in name.split("."))
    return [evidence for part in inner for evidence in _of_part(part)]


def _of_part(part: Any) -> Iterator[Evidence]:
    """Yield what a linear layer, a convolution, a norm or a permutation says about the axes of an image."""
    widths = tuple(size for size in (width(part, "input"), width(part, "output")) if size)
    kind = type(part).__name__
    if _permute_layout(part, "output"):
        yield None, ()
    elif isinstance(part, FIRST) or ("Norm" in kind and "2d" in kind):  # a LayerNorm2d is a LayerNorm
        yield "channels_first", widths
    elif getattr(part, "data_format", None) in FORMATS.values():  # ConvNeXt's own LayerNorm
        yield part.data_format, widths
    elif isinstance(part, LAST) or kind == "Conv1D":
        yield "channels_last", widths
    elif widths and "1d" not in kind:
        yield None, widths


def _permute_layout(part: Any, side: Side) -> Layout | None:
    """Return the layout at one side of torchvision's `Permute`, None for other modules."""
    dims = tuple(part.dims) if type(part).__name__ == "Permute" and hasattr(part, "dims") else ()
    if dims not in (TO_FIRST, TO_LAST):
        return None
    return "channels_first" if (dims == TO_FIRST) == (side == "output") else "channels_last"


def _neighbours(modules: Mapping[str, nn.Module], path: str) -> list[Evidence]:
    around = [name for name in modules if name != path and not path.startswith(f"{name}." if name else "")]
    position = {name: number for number, name in enumerate(modules)}
    before = [name for name in around if position[name] < position[path]]
    for name in (*before[::-1], *around[len(before) :]):
        found = list(_of_part(modules[name]))
        if found:
            return found
    return []


def _hides_axes(module: nn.Module) -> bool:
    """Return whether parts of a module may see means, as in squeeze-and-excitation, or permuted images.

    Attention permutes its heads, which does not matter.
    """
    parts = [part for part in module.modules() if not list(_of_part(part)) and "Att" not in type(part).__name__]
    names = {name for part in parts for name in code_names(part)}
    return any("Pool" in type(part).__name__ for part in parts) or any(
        name in HIDING or "bchw" in name or "nchw" in name for name in names
    )


def _convolves(module: nn.Module, permuting: tuple[str, ...]) -> bool:
    """Return whether images must have their channels first: there are convolutions, and nothing permutes.

    permuting: the names in code that count as such.
    """
    convolves = any(isinstance(part, nn.Conv2d | nn.Conv3d) for part in module.modules())
    return convolves and not any(name in permuting for part in module.modules() for name in _names_of(part))


def _enters(module: nn.Module) -> int | None:
    """Return how many features enter a module whose first part is a convolution."""
    parts = (part for part in module.modules() if not any(True for _ in part.children()) and list(_of_part(part)))
    first = next(parts, None)
    return first.in_channels if isinstance(first, nn.Conv2d | nn.Conv3d) else None


def _names_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names in the code of a module that is not torch's own."""
    return () if type(module).__module__.startswith("torch.") else code_names(module)


def _format(module: nn.Module) -> Layout | None:
    declared = getattr(module, "output_fmt", None)
    return FORMATS.get(str(getattr(declared, "value", declared)))


def _around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a path, the nearest first."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _find_declared(modules: Mapping[str, nn.Module], path: str) -> Layout | None:
    """Return what timm says about the images of the nearest module around a path."""
    return next((found for outer in _around(path) if (found := _format(modules[outer])) is not None), None)


def _features(modules: Mapping[str, nn.Module], path: str) -> int | None:
    """Return how many features a stage of a timm model has, as the model lists them."""
    for outer in _around(path):
        listed: Any = getattr(modules[outer], "feature_info", None)
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and "num_chs" in entry and join_path(outer, entry.get("module", "")) == path:
                return int(entry["num_chs"])
    return None
