"""Trained models in folders of their own, from which they come back as they were."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from uncollapse.attachment.attach import attachments
from uncollapse.attachment.save import DESCRIPTION, load_cure, save_cure
from uncollapse.backbones.random_weights import is_of_cure
from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io.hf_models import Origin, load_classifier, load_tokenizer
from uncollapse.io.loading import silence_libraries
from uncollapse.io.tensor_files import load_into
from uncollapse.lab.data.image.augmentation import SHARE
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import preserve_random_state
from uncollapse.lab.models.text_classifier import parse_place, use_l2_norms
from uncollapse.lab.models.vision_classifier import build_vit, sizes_of
from uncollapse.lab.runs.model_folder import CONFIG, SETTINGS, WEIGHTS, check_weights, read_json, whole

WHOLE_PICTURE = {"crop_pct": 1.0, "crop_mode": "squash"}  # how models that learned from padded crops are judged


def save_weights(runtime: Runtime, model: nn.Module, config: Any) -> None:
    """Keep the weights of a model beside the settings of its run, if the runtime says so.

    The folder gets model.safetensors and config.json, which `uncollapse train RECIPE --config` reads.
    """
    if runtime.save_to is None:
        return
    with whole(runtime.save_to) as folder:
        _write_weights(folder / WEIGHTS, model.state_dict())
        _write_settings(folder / CONFIG, config)


def save_text_model(
    runtime: Runtime,
    model: Any,
    words: Any,
    config: Any,
    labels: tuple[str, ...] = (),
) -> None:
    """Keep a model of transformers with its tokenizer and its cure, if the runtime says so.

    The folder is one of `save_pretrained`, with the cure as `uc.save_cure` writes it and the settings of the run in
    settings.json. `load_text_model` brings all of it back.

    Args:
        runtime: with the folder.
        model: with a head for sentences.
        words: its tokenizer.
        config: of the run.
        labels: names of the classes, which the model's configuration then has; none for scores.
    """
    if runtime.save_to is None:
        return
    with whole(runtime.save_to) as folder:
        if labels:
            model.config.id2label = dict(enumerate(labels))
            model.config.label2id = {label: number for number, label in enumerate(labels)}
        own = {name: tensor for name, tensor in model.state_dict().items() if not is_of_cure(name)}
        with silence_libraries(import_optional("transformers", "hf")):
            model.save_pretrained(folder, state_dict=own)
            words.save_pretrained(folder)
        if attachments(model):
            save_cure(model, folder)
        _write_settings(folder / SETTINGS, config)
    if _has_l2(asdict(config)):
        warnings.warn(
            f"The L2 norms of the model in {runtime.save_to} are no part of transformers. Load it with "
            "uncollapse.lab.runs.saved_models.load_text_model, which restores them: LayerNorms give other answers.",
            stacklevel=2,
        )


def load_text_model(folder: str | Path) -> tuple[nn.Module, Any]:
    """The model that `save_text_model` kept, in evaluation mode and with its cure, and its tokenizer."""
    folder = Path(folder)
    settings, facts = _read(folder)
    check_weights(folder)
    labels = facts.get("id2label") or {0: "", 1: ""}
    origin = Origin(str(folder))
    model = load_classifier(origin, len(labels), head_too=True)
    if _has_l2(settings):
        use_l2_norms(model, parse_place(settings["at"]))
    load_saved_cure(model, folder)
    return model.eval(), load_tokenizer(origin)


def save_vision_model(runtime: Runtime, vit: Any, config: Any, classes: Sequence[str]) -> None:
    """Keep a vision transformer of timm and its cure, if the runtime says so.

    timm loads the folder by itself: `timm.create_model("local-dir:FOLDER", pretrained=True)`. It has the cure as
    `uc.save_cure` writes it, and the settings of the run in settings.json. `load_vision_model` brings all of it back.

    Args:
        runtime: with the folder.
        vit: without what was there for training alone, such as a head of its patches.
        config: of the run.
        classes: their names, in the order of the outputs.
    """
    if runtime.save_to is None:
        return
    with whole(runtime.save_to) as folder:
        _write_weights(folder / WEIGHTS, {k: v for k, v in vit.state_dict().items() if not is_of_cure(k)})
        facts = _timm_facts(vit, config, classes)
        (folder / CONFIG).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if attachments(vit):
            save_cure(vit, folder)
        _write_settings(folder / SETTINGS, config)
    if config.talking_heads:
        warnings.warn(
            f"The talking heads of the model in {runtime.save_to} are not part of timm, which refuses its weights. "
            "Load it with uncollapse.lab.runs.saved_models.load_vision_model, which puts them back.",
            stacklevel=2,
        )


def load_vision_model(folder: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """The model that `save_vision_model` kept, in evaluation mode and with its cure, and the names of its classes."""
    folder = Path(folder)
    settings, facts = _read(folder)
    if "architecture" not in facts or "talking_heads" not in settings:
        raise UsageError(f"{folder} holds a kept model of another kind than a vision transformer.")
    with (
        file_errors(folder, "folder of a kept model"),
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
        raise UsageError(f"{folder} holds no whole model: {WEIGHTS} is missing. Keep the model again.")
    check_weights(folder)
    load_into(vit, folder / WEIGHTS)
    load_saved_cure(vit, folder)
    return vit.eval(), names


def load_saved_cure(model: nn.Module, folder: Path) -> None:
    """Put the cure of a kept model into it, with what it had learned; nothing happens without one."""
    if not (folder / DESCRIPTION).is_file():
        return
    try:
        load_cure(model, folder)
    except (ValueError, OSError) as error:
        raise UsageError(f"The cure in {folder} cannot be loaded: {error}") from error


def _timm_facts(vit: Any, config: Any, classes: Sequence[str]) -> dict[str, Any]:
    """What timm's config.json says of a model: how to build it, and how pictures are made ready for it."""
    own = vit.pretrained_cfg
    said = {name: own[name] for name in ("interpolation", "mean", "std", "first_conv", "classifier")}
    judged = {"crop_pct": SHARE, "crop_mode": "center"} if config.crop == "resized" else WHOLE_PICTURE
    size = [vit.in_chans, *vit.patch_embed.img_size]
    return {
        "architecture": own["architecture"],
        "num_classes": vit.num_classes,
        "num_features": vit.num_features,
        "label_names": list(classes),
        "model_args": sizes_of(vit),
        "pretrained_cfg": said
        | judged
        | {"input_size": size, "fixed_input_size": True, "num_classes": vit.num_classes},
    }


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the run that a model was kept of, and the model's configuration."""
    return read_json(folder / SETTINGS), read_json(folder / CONFIG)


def _write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # each tensor has memory of its own: safetensors refuses what several modules share
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path.write_bytes(safetensors.torch.save(own))


def _write_settings(path: Path, config: Any) -> None:
    path.write_text(json.dumps(asdict(config), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _has_l2(settings: dict[str, Any]) -> bool:
    return settings.get("norm") == "l2" and settings.get("cure") == "contra_norm"
