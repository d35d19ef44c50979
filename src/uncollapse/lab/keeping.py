"""Trained models in folders of their own, each of which is there as a whole or not at all."""

import glob
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import nn

from uncollapse.attachment import attachments
from uncollapse.backbones.random_weights import is_of_cure
from uncollapse.cure_files import DESCRIPTION, load_cure, save_cure
from uncollapse.files import keep_names
from uncollapse.lab.models.text_classifier import place_of, with_l2_norms
from uncollapse.lab.sessions import Session
from uncollapse.loading.errors import UsageError, library
from uncollapse.loading.huggingface import Origin, classifier, tokenizer
from uncollapse.loading.quiet import quiet

WEIGHTS, CONFIG, SETTINGS = "model.safetensors", "config.json", "settings.json"


def keep_weights(session: Session, model: nn.Module, config: Any) -> None:
    """Keep the weights of a model beside the settings of its run, if the session says so.

    The folder gets model.safetensors and config.json, which `uncollapse train RECIPE --config` reads.
    """
    if session.keep is None:
        return
    with whole(session.keep) as folder:
        # each tensor has memory of its own: safetensors refuses what several modules share
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
        (folder / WEIGHTS).write_bytes(safetensors.torch.save(tensors))
        _write_settings(folder / CONFIG, config)


def keep_text(
    session: Session,
    model: Any,
    words: Any,
    config: Any,
    labels: tuple[str, ...] = (),
    more: Callable[[Path], None] | None = None,
) -> None:
    """Keep a model of transformers with its tokenizer and its cure, if the session says so.

    The folder is one of `save_pretrained`, with the cure as `uc.save_cure` writes it and the settings of the run in
    settings.json. `load_text` brings all of it back.

    Args:
        session: with the folder.
        model: with a head for sentences.
        words: its tokenizer.
        config: of the run.
        labels: names of the classes, which the model's configuration then has; none for scores.
        more: writes what else belongs into the folder.
    """
    if session.keep is None:
        return
    with whole(session.keep) as folder:
        if labels:
            model.config.id2label = dict(enumerate(labels))
            model.config.label2id = {label: number for number, label in enumerate(labels)}
        own = {name: tensor for name, tensor in model.state_dict().items() if not is_of_cure(name)}
        with quiet(library("transformers", "hf")):
            model.save_pretrained(folder, state_dict=own)
            words.save_pretrained(folder)
        if attachments(model):
            save_cure(model, folder)
        _write_settings(folder / SETTINGS, config)
        if more is not None:
            more(folder)
    if _has_l2(asdict(config)):
        warnings.warn(
            f"The L2 norms of the model in {session.keep} are no part of transformers. Load it with "
            "uncollapse.lab.keeping.load_text, which puts them back: with its LayerNorms it gives other answers.",
            stacklevel=2,
        )


def load_text(folder: str | Path) -> tuple[nn.Module, Any]:
    """The model that `keep_text` kept, in evaluation mode and with its cure, and its tokenizer."""
    folder = Path(folder)
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        labels = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("id2label") or {0: "", 1: ""}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} holds no kept model: {error}. Name the folder that `uncollapse train … --keep` told."
        ) from error
    origin = Origin(str(folder))
    model = classifier(origin, len(labels), head_too=True)
    if _has_l2(settings):
        with_l2_norms(model, place_of(settings["at"]))
    if (folder / DESCRIPTION).is_file():
        load_cure(model, folder)
    return model.eval(), tokenizer(origin)


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes `folder` at the end, in the place of an earlier one; if anything fails, it goes."""
    _check_replaceable(folder)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        yield part
        _sync(part)
        _put(part, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"The model cannot be kept in {folder}: {reason}. Name another folder, or make room."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    """Raise where something else than a kept model would go."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model is kept in a folder. Name another one.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if SETTINGS not in names and not names <= {CONFIG, WEIGHTS}:
        raise UsageError(f"{folder} has other files than a kept model, which would be lost. Name a new folder.")


def _put(part: Path, folder: Path) -> None:
    """Rename. A folder cannot be replaced in one moment: the old one steps aside and goes when the new one is there."""
    old = part.with_suffix(".old")
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(part, folder)
    except BaseException:
        if old.exists():
            os.rename(old, folder)
        raise
    keep_names(folder.parent)
    digit = "[0-9a-f]"
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{32 * digit}.*"):  # the old one, and what kills left
        shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Bring all files to the disk, whoever wrote them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())


def _write_settings(path: Path, config: Any) -> None:
    path.write_text(json.dumps(asdict(config), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _has_l2(settings: dict[str, Any]) -> bool:
    return settings.get("norm") == "l2" and settings.get("cure") == "contra_norm"
