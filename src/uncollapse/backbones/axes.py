"""Tell from its modules whether images at a place have their channels first (b, d, h, w) or last (b, h, w, d)."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from uncollapse.backbones.introspection import code_names, width
from uncollapse.backbones.sites import CHILD, Axes, Layout, Side

FORMATS: dict[str, Layout] = {"NCHW": "channels_first", "NHWC": "channels_last"}  # timm's `output_fmt`
PERMUTED: dict[tuple[int, ...], Layout] = {(0, 3, 1, 2): "channels_first", (0, 2, 3, 1): "channels_last"}
FIRST = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.GroupNorm)
LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
POOLS = ("mean", "adaptive_avg_pool2d", "avg_pool2d")  # what comes after them need not be an image

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
    if own is not None and side == "output":
        return Axes(name, layout=own)
    found = _evidence(modules[path], side) or _neighbours(modules, path)
    layouts = {layout for layout, _ in found}
    layout = next(iter(layouts)) if len(layouts) == 1 and not _pools(modules[path]) else None
    widths = tuple(dict.fromkeys(size for _, sizes in found for size in sizes))
    return Axes(name, widths, layout, _declared(modules, path))


def _evidence(module: nn.Module, side: Side) -> list[Evidence]:
    """Return what the parts of a module say; of a Sequential only the part at this side."""
    if isinstance(module, nn.Sequential):
        parts = [*module] if side == "input" else [*module][::-1]
        return next((found for part in parts if (found := _evidence(part, side))), [])
    inner = (part for name, part in module.named_modules() if CHILD not in name.split("."))
    return [evidence for part in inner for evidence in _of_part(part)]


def _of_part(part: Any) -> Iterator[Evidence]:
    """Yield what a linear layer, a convolution, a norm or a permutation says about the axes of an image."""
    widths = tuple(size for size in (width(part, "input"), width(part, "output")) if size)
    kind = type(part).__name__
    if kind == "Permute" and tuple(getattr(part, "dims", ())) in PERMUTED:
        yield PERMUTED[tuple(part.dims)], ()
    elif isinstance(part, FIRST) or ("Norm" in kind and "2d" in kind):  # a LayerNorm2d is a LayerNorm
        yield "channels_first", widths
    elif getattr(part, "data_format", None) in FORMATS.values():  # ConvNeXt's own LayerNorm
        yield part.data_format, widths
    elif isinstance(part, LAST) or kind == "Conv1D":
        yield "channels_last", widths
    elif widths and "1d" not in kind:
        yield None, widths


def _neighbours(modules: Mapping[str, nn.Module], path: str) -> list[Evidence]:
    around = [name for name in modules if name != path and not path.startswith(f"{name}." if name else "")]
    names = list(modules)
    before = [name for name in around if names.index(name) < names.index(path)]
    for name in (*before[::-1], *around[len(before) :]):
        found = list(_of_part(modules[name]))
        if found:
            return found
    return []


def _pools(module: nn.Module) -> bool:
    """Return whether a module takes means: its linear layers may then see vectors, as in squeeze-and-excitation."""
    return any("Pool" in type(part).__name__ or {*POOLS} & {*code_names(part)} for part in module.modules())


def _format(module: nn.Module) -> Layout | None:
    declared = getattr(module, "output_fmt", None)
    return FORMATS.get(str(getattr(declared, "value", declared)))


def _declared(modules: Mapping[str, nn.Module], path: str) -> Layout | None:
    """Return what timm says about the images of the nearest module around a path."""
    while path:
        path = path.rpartition(".")[0]
        if path in modules and (found := _format(modules[path])) is not None:
            return found
    return None
