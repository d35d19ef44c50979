"""Initial weights of a vision transformer: timm's pretrained ones, those of a saved model, or of a file."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.attachment.save import DESCRIPTION
from uncollapse.errors import UsageError, import_optional
from uncollapse.io import timm_models
from uncollapse.io.loading import silence_libraries
from uncollapse.io.tensor_files import weights_of
from uncollapse.lab.models.vision_classifier import heads_of
from uncollapse.lab.runs.saved_models import CONFIG, SETTINGS, WEIGHTS, load_saved_cure, read_json

SCRATCH, PUBLISHED = "scratch", "pretrained"
HEADS = ("head.", "head_dist.")
ADDED = {"pre_norm": False}  # settings of a cure that earlier versions did not write, with what these did
TALKING = (".attn.before.weight", ".attn.after.weight")  # they start as the identity, which changes nothing


def load_start(vit: nn.Module, start: str, name: str, cure: Mapping[str, Any], classes: Sequence[str] = ()) -> bool:
    """Load the weights that a run starts from into a model.

    timm resizes positions for images and patches of another size. A head for other classes stays random, with a
    warning. Everything else must match.

    Args:
        vit: Model with random weights and without a cure.
        start: "scratch", which changes nothing, "pretrained", a folder that `save_vision_model` wrote, or a file.
        name: Name of the model in timm.
        cure: Settings of the run's cure by name. A model that was saved with a cure must have the same.
        classes: Names of the classes, where they are known; a saved model knows its own.

    Returns:
        Whether the cure was loaded and attached too.
    """
    if start == SCRATCH:
        return False
    if start == PUBLISHED:
        published = timm_models.load_timm_model(name, random_weights=False, way_out="begin with --start scratch.")
        _fill(vit, published.state_dict(), heads_of(published), f"The published model {name}")
        return False
    folder = Path(start)
    file = folder / WEIGHTS if folder.is_dir() else folder
    if not file.is_file():
        raise UsageError(
            f"start must be {SCRATCH}, {PUBLISHED}, a folder that --save wrote or a file of weights, and {file} does "
            "not exist. Name an existing one with --start."
        )
    cured = folder.is_dir() and _has_cure(folder, cure)
    kept = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    heads: int | None = kept.get("model_args", {}).get("num_heads")
    known = tuple(kept.get("label_names", ()))
    other = bool(classes and known) and known != tuple(classes)
    _fill(vit, weights_of(file, vit), heads, start, other_classes=other)
    if cured:
        load_saved_cure(vit, folder)
    return cured


def _has_cure(folder: Path, cure: Mapping[str, Any]) -> bool:
    """Return whether a model was saved with a cure; raise a UsageError if it is not that of the run."""
    if not (folder / DESCRIPTION).is_file():
        return False
    settings = ADDED | read_json(folder / SETTINGS)
    kept = {name: settings.get(name) for name in cure}
    if kept != dict(cure):
        other = ", ".join(f"{name} {value}" for name, value in kept.items() if value != cure[name])
        raise UsageError(
            f"{folder} was saved with {kept['cure']}, and this run has another cure: there it was {other}. Take the "
            "same settings to continue with it, or start from a model that was saved without a cure."
        )
    return True


def _fill(vit: Any, weights: dict[str, Tensor], heads: int | None, start: str, other_classes: bool = False) -> None:
    """Copy weights into the model. start: where they are from, in words."""
    if heads is not None and heads != heads_of(vit):
        raise UsageError(f"{start} has {heads} heads of attention, the model {heads_of(vit)}; take --heads {heads}.")
    own = vit.state_dict()
    _check_blocks(own, weights, start)
    fresh = [name for name in own if name.endswith(TALKING) and name not in weights]
    head = [name for name in own if name.startswith(HEADS)]
    fits = all(name in weights and weights[name].shape[0] == own[name].shape[0] for name in head) and not other_classes
    if not fits:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(HEADS)}
        fresh += head
    _check_names(own, weights, fresh, start)
    resized = _resize(vit, weights, start)
    _check_shapes(own, resized, start)
    vit.load_state_dict(resized, strict=False)
    if not fits:
        which = "other classes" if other_classes else f"another number of classes than {vit.num_classes}"
        warnings.warn(f"The head is initialized anew: that of {start} is for {which}.", stacklevel=3)


def _check_blocks(own: Iterable[str], weights: Iterable[str], start: str) -> None:
    ours, theirs = (
        len({name.split(".")[1] for name in names if name.startswith("blocks.")}) for names in (own, weights)
    )
    if theirs and ours != theirs:
        raise UsageError(f"{start} has {theirs} blocks, the model {ours}; take --depth {theirs}.")


def _check_names(own: Iterable[str], weights: Iterable[str], fresh: Iterable[str], start: str) -> None:
    missing = [name for name in own if name not in weights and name not in fresh]
    foreign = [name for name in weights if name not in own]
    sides = ((f"it lacks {_some(missing)}", missing), (f"it has {_some(foreign)} in addition", foreign))
    told = " and ".join(words for words, names in sides if names)
    if told:
        raise UsageError(f"{start} does not have the weights of this model: {told}. Take the model it was trained as.")


def _check_shapes(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], start: str) -> None:
    wrong = [name for name, tensor in weights.items() if tensor.shape != own[name].shape]
    if wrong:
        got, expected = tuple(weights[wrong[0]].shape), tuple(own[wrong[0]].shape)
        raise UsageError(
            f"{start} does not have the weights of this model: {_some(wrong)} differ in shape, the first is {got}, not "
            f"{expected}. Take the same --width, and the model it was trained as."
        )


def _resize(vit: nn.Module, weights: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    """Return the weights with positions and patches in the model's sizes."""
    module: Any = import_optional("timm.models.vision_transformer", "timm")
    try:
        with silence_libraries(), torch.no_grad():
            resized: dict[str, Tensor] = module.checkpoint_filter_fn(weights, vit)
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"timm cannot resize {start} to the model's image and patch size: {reason}") from error
    return resized


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
