"""Save trained models to folders, and load them as they were."""

import glob
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from uncollapse.attachment.attach import attachments
from uncollapse.attachment.save import DESCRIPTION, load_cure, save_cure
from uncollapse.backbones.random_weights import is_of_cure
from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io.files import ADVICE, replace_folder
from uncollapse.io.hf_models import Origin, load_classifier, load_tokenizer
from uncollapse.io.loading import silence_libraries
from uncollapse.io.tensor_files import load_into
from uncollapse.lab.data.image.augmentation import SHARE
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import preserve_random_state
from uncollapse.lab.models.text_classifier import parse_place, use_l2_norms
from uncollapse.lab.models.vision_classifier import build_vit, sizes_of

WHOLE_IMAGE = {"crop_pct": 1.0, "crop_mode": "squash"}  # evaluation of models that were trained on padded crops


def save_weights(runtime: Runtime, model: nn.Module, config: Any) -> None:
    """Save the weights of a model and the settings of its run, if the runtime has a folder for them.

    The folder has model.safetensors and config.json, which `uncollapse train RECIPE --config` reads.
    """
    if runtime.save_to is None:
        return
    with atomic_folder(runtime.save_to) as folder:
        _write_weights(folder / WEIGHTS, model.state_dict())
        _write_settings(folder / CONFIG, config)


def save_text_model(
    runtime: Runtime,
    model: Any,
    tokenizer: Any,
    config: Any,
    labels: tuple[str, ...] = (),
) -> None:
    """Save a transformers model, its tokenizer and its cure, if the runtime has a folder for them.

    The folder is that of `save_pretrained`, with the files of `uc.save_cure` and the settings of the run in
    settings.json. `load_text_model` restores all of it.

    Args:
        runtime: Its `save_to` is the folder.
        model: A classifier or regressor of sentences.
        tokenizer: Its tokenizer.
        config: Config of the run.
        labels: Names of the classes, stored in the model's configuration; none for scores.
    """
    if runtime.save_to is None:
        return
    with atomic_folder(runtime.save_to) as folder:
        if labels:
            model.config.id2label = dict(enumerate(labels))
            model.config.label2id = {label: number for number, label in enumerate(labels)}
        own = {name: tensor for name, tensor in model.state_dict().items() if not is_of_cure(name)}
        with silence_libraries(import_optional("transformers", "hf")):
            model.save_pretrained(folder, state_dict=own)
            tokenizer.save_pretrained(folder)
        if attachments(model):
            save_cure(model, folder)
        _write_settings(folder / SETTINGS, config)
    if _has_l2(asdict(config)):
        warnings.warn(
            f"The L2 norms of the model in {runtime.save_to} are not part of transformers. Load it with "
            "uncollapse.lab.runs.saved_models.load_text_model, which restores them: LayerNorms give other answers.",
            stacklevel=2,
        )


def load_text_model(folder: str | Path) -> tuple[nn.Module, Any]:
    """Return a model of `save_text_model`, in evaluation mode and with its cure, and its tokenizer."""
    folder = Path(folder)
    settings, facts = _read(folder)
    labels = facts.get("id2label") or {0: "", 1: ""}
    origin = Origin(str(folder))
    model = load_classifier(origin, len(labels), head_too=True)
    if _has_l2(settings):
        use_l2_norms(model, parse_place(settings["at"]))
    load_saved_cure(model, folder)
    return model.eval(), load_tokenizer(origin)


def save_vision_model(runtime: Runtime, vit: Any, config: Any, classes: Sequence[str]) -> None:
    """Save a timm vision transformer and its cure, if the runtime has a folder for them.

    timm loads the folder by itself: `timm.create_model("local-dir:FOLDER", pretrained=True)`. It has the
    files of `uc.save_cure`, and the settings of the run in settings.json. `load_vision_model` restores all of it.

    Args:
        runtime: Its `save_to` is the folder.
        vit: The model, without parts that only training needs, such as a head for its patches.
        config: Config of the run.
        classes: Names of the classes, in the order of the outputs.
    """
    if runtime.save_to is None:
        return
    with atomic_folder(runtime.save_to) as folder:
        _write_weights(folder / WEIGHTS, {k: v for k, v in vit.state_dict().items() if not is_of_cure(k)})
        facts = _timm_facts(vit, config, classes)
        (folder / CONFIG).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if attachments(vit):
            save_cure(vit, folder)
        _write_settings(folder / SETTINGS, config)
    if config.talking_heads:
        warnings.warn(
            f"The talking heads of the model in {runtime.save_to} are not part of timm, which refuses its weights. "
            "Load it with uncollapse.lab.runs.saved_models.load_vision_model, which restores them.",
            stacklevel=2,
        )


def load_vision_model(folder: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a model of `save_vision_model`, in evaluation mode and with its cure, and the names of its classes."""
    folder = Path(folder)
    settings, facts = _read(folder)
    if "architecture" not in facts or "talking_heads" not in settings:
        raise UsageError(f"{folder} is a saved model, but not a vision transformer.")
    with (
        file_errors(folder, "folder of a saved model"),
        preserve_random_state(),
    ):  # weights are drawn before they are read
        names = tuple(map(str, facts["label_names"]))
        vit = build_vit(
            facts["architecture"],
            facts["num_classes"],
            talking_heads=settings["talking_heads"],
            pretrained_cfg=facts["pretrained_cfg"],
            **facts["model_args"],
        )
    if not (folder / WEIGHTS).is_file():
        raise UsageError(f"{folder} is not complete: {WEIGHTS} is missing. Save the model again.")
    load_into(vit, folder / WEIGHTS)
    load_saved_cure(vit, folder)
    return vit.eval(), names


def load_saved_cure(model: nn.Module, folder: Path) -> None:
    """Attach the cure of a saved model to it, with its learned parameters; do nothing if there is none."""
    if not (folder / DESCRIPTION).is_file():
        return
    try:
        load_cure(model, folder)
    except (ValueError, OSError) as error:
        raise UsageError(f"The cure in {folder} cannot be loaded: {error}") from error


def _timm_facts(vit: Any, config: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Return timm's config.json of a model: how to build it, and how to preprocess images."""
    own = vit.pretrained_cfg
    inputs = {name: own[name] for name in ("interpolation", "mean", "std", "first_conv", "classifier")}
    evaluation = {"crop_pct": SHARE, "crop_mode": "center"} if config.crop == "resized" else WHOLE_IMAGE
    size = [vit.in_chans, *vit.patch_embed.img_size]
    return {
        "architecture": own["architecture"],
        "num_classes": vit.num_classes,
        "num_features": vit.num_features,
        "label_names": list(classes),
        "model_args": sizes_of(vit),
        "pretrained_cfg": inputs
        | evaluation
        | {"input_size": size, "fixed_input_size": True, "num_classes": vit.num_classes},
    }


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the run of a saved model, and the model's configuration."""
    return read_json(folder / SETTINGS), read_json(folder / CONFIG)


def _write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # one copy per tensor: safetensors rejects shared memory
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path.write_bytes(safetensors.torch.save(own))


def _write_settings(path: Path, config: Any) -> None:
    path.write_text(json.dumps(asdict(config), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _has_l2(settings: dict[str, Any]) -> bool:
    return settings.get("norm") == "l2" and settings.get("cure") == "contra_norm"


WEIGHTS, CONFIG, SETTINGS = "model.safetensors", "config.json", "settings.json"


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` at the end, replacing an earlier one; on failure it is removed."""
    _check_replaceable(folder)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        yield part
        _sync_files(part)
        replace_folder(part, folder, part.with_suffix(".old"))
        _remove_leftovers(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = ADVICE.get(getattr(error, "errno", None) or 0, "Name another folder, or make room.")
        raise UsageError(f"The model cannot be saved in {folder}: {reason}. {advice}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file of a saved model; UsageError if it is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{path.name} is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path.parent} is not a saved model: {error}. Name the folder that `uncollapse train … --save` reported."
        ) from error
    return content


def _check_replaceable(folder: Path) -> None:
    """Raise if something other than a saved model would be lost."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model is saved in a folder. Name another one.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if SETTINGS not in names and not names <= {CONFIG, WEIGHTS}:
        raise UsageError(f"{folder} has other files than a saved model, which would be lost. Name a new folder.")


def _remove_leftovers(folder: Path) -> None:
    """Remove the folder that was replaced, and what killed processes have left."""
    digit = "[0-9a-f]"
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{32 * digit}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """Write all files to the disk, whichever library wrote them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
