"""Save and load the cures of a model in files of their own: attachments as JSON, weights as safetensors."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from uncollapse import backbones
from uncollapse.attachment.attach import Attachment, attach, attachments
from uncollapse.backbones import forward
from uncollapse.io import files, hub, typed_json
from uncollapse.registry import CURES

if TYPE_CHECKING:
    from uncollapse.diagnosis.result import Diagnosis

SCHEMA = 1
DESCRIPTION, WEIGHTS = files.CURE_FILE, "uncollapse.safetensors"
WAITING = f".{WEIGHTS}.new"  # the weights until their description is written


@dataclass(frozen=True)
class Entry:
    """A saved attachment: the arguments of `attach`, and the model. root: the part that was passed to `attach`."""

    root: str
    cure: str
    options: Mapping[str, Any]
    at: tuple[str, ...]
    layers: tuple[int, ...]
    part: str | None
    modules: tuple[str, ...] | None
    layout: str | None
    tokens: str
    causal: bool | None
    family: str
    architecture: str
    blocks: int
    padding: str = "masked"  # absent in files of earlier versions
    causal_given: bool = False  # likewise: there False was what `attach` assumed, not what the user said


def save_cure(
    model: nn.Module,
    folder: str | Path,
    *,
    repo_id: str | None = None,
    private: bool = False,
    diagnoses: "Mapping[str, Diagnosis] | None" = None,
) -> Path:
    """Write all cures of a model, and nothing else of it, into a folder, and to the HuggingFace hub if asked to.

    The folder may be the one of `save_pretrained`: load the model from it first, then the cures.

    Args:
        model: with at least one attachment.
        folder: receives uncollapse.json and uncollapse.safetensors. A process that is killed leaves the cure that was
            saved there before, or the new one.
        repo_id: also push both files, with a card, to this repository ("owner/name"); it is created if there is none.
        private: whether a new repository is private.
        diagnoses: title -> diagnosis for the card, such as {"Before": …, "After": …}.

    Returns:
        The folder. It is complete even if the push fails.
    """
    found = attachments(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no cure to save: attach one with uc.attach.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = safetensors.torch.save({key: tensor.cpu().contiguous() for key, tensor in _weights(found).items()})
    described = {
        "schema": SCHEMA,
        "cures": [_describe(model, attachment) for attachment in found],
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    try:
        text = json.dumps(described, indent=2, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"An option of the cure cannot be written as JSON: {error}.") from error
    _write(folder, weights, text + "\n")
    if repo_id is not None:
        contents = {WEIGHTS: weights, DESCRIPTION: (text + "\n").encode()}
        card = _card(found, repo_id, diagnoses or {})
        hub.push(repo_id, contents, card, private=private, message=f"Cure: {found[0].cure}")
    return folder


def load_cure(model: nn.Module, folder: str | Path, *, revision: str | None = None) -> tuple[Attachment, ...]:
    """Attach the cures that `save_cure` wrote, with their weights.

    Args:
        model: of the same architecture, without a cure.
        folder: with uncollapse.json and uncollapse.safetensors; or a repository on the HuggingFace hub, "owner/name".
        revision: of the repository: a branch, a tag or a commit.

    Returns:
        The attachments. If anything does not fit, an error is raised and the model stays as it was.
    """
    model = forward.unwrap_compiled(model)
    present = attachments(model)
    if present:
        raise ValueError(f"The model has a cure already: {present[0]}. Remove it first: uc.detach(model).")
    if isinstance(folder, str) and hub.is_name(folder):
        folder = hub.pull(folder, [DESCRIPTION, WEIGHTS], revision)
    described, weights = _read(Path(folder))
    for entry in described:
        _check(model, entry)
    with ExitStack() as undo:
        done = tuple(undo.enter_context(_attach_entry(model, entry)) for entry in described)
        _fill(done, weights)
        undo.pop_all()
    return done


def _write(folder: Path, weights: bytes, description: str) -> None:
    """Write both files as one: the digest in the description decides which weights belong to it.

    Until the new description is there, the old weights keep their name; from then on the new ones count, even if they
    do not have it yet, see `_read_weights`.
    """
    files.write(folder / WAITING, weights)
    files.write(folder / DESCRIPTION, description)
    with files.write_errors(folder / WEIGHTS):
        try:
            os.replace(folder / WAITING, folder / WEIGHTS)
        except FileNotFoundError:  # another process saved at the same time, such as the next rank of a training
            files.write(folder / WEIGHTS, weights)
        files.sync_folder(folder)


def _card(found: tuple[Attachment, ...], repo_id: str, diagnoses: "Mapping[str, Diagnosis]") -> str:
    """Return the model card: what the cure is, how to load it, and the diagnoses."""
    cures = ", ".join(dict.fromkeys(attachment.cure for attachment in found))
    tags = "".join(f"\n- {name}" for name in dict.fromkeys(["uncollapse", *(each.cure for each in found)]))
    parts = [
        f"---\nlibrary_name: uncollapse\ntags:{tags}\n---",
        f"# {cures} for {found[0].architecture}",
        "Only the weights of the cure are in this file, not those of the model.",
        f'```python\nimport uncollapse as uc\n\nuc.load_cure(model, "{repo_id}")\n```',
        *(f"- {attachment}" for attachment in found),
        *(f"## {title}\n\n```text\n{diagnosis}\n```" for title, diagnosis in diagnoses.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _weights(found: tuple[Attachment, ...]) -> dict[str, Tensor]:
    """Return the tensors themselves, by number of the attachment, block and place, and name of the tensor."""
    return {
        f"{number}/{key}/{name}": tensor
        for number, attachment in enumerate(found)
        for key, cure in attachment.cures.items()
        for name, tensor in cure.state_dict().items()
    }


def _describe(model: nn.Module, attachment: Attachment) -> dict[str, Any]:
    """Return the arguments of `attach`. root: the part of the model that was passed to it."""
    root = None if attachment.root is None else attachment.root()
    return {
        "root": next((name for name, module in model.named_modules() if module is root), ""),
        "cure": attachment.cure,
        "options": attachment.options,
        "at": list(attachment.at),
        "layers": list(attachment.blocks),
        **attachment.arguments,
        "causal_given": attachment.arguments["causal"] is not None,
        "family": attachment.family,
        "architecture": attachment.architecture,
        "blocks": attachment.count,
    }


def _attach_entry(model: nn.Module, entry: Entry) -> Attachment:
    arguments: dict[str, Any] = {"part": entry.part, "modules": entry.modules, "layout": entry.layout}
    causal = entry.causal if entry.causal_given else entry.causal or None  # None: the model is probed
    arguments |= {"tokens": entry.tokens, "causal": causal, "padding": entry.padding}
    if entry.cure in CURES and CURES[entry.cure].acts_on != "edges":
        arguments["layers"] = list(entry.layers)
    try:
        return attach(_root(model, entry), entry.cure, at=list(entry.at), **arguments, **entry.options)
    except (KeyError, TypeError) as error:  # an option that the cure does not have, or of another kind
        raise ValueError(f"The saved cure {entry.cure!r} cannot be attached: {error}.") from error


def _root(model: nn.Module, entry: Entry) -> nn.Module:
    """Return the part that the cure was attached to, or the model itself if it lacks that part, such as a head."""
    parts: dict[str, nn.Module] = dict(model.named_modules())
    return parts.get(entry.root, model)


def _check(model: nn.Module, entry: Entry) -> None:
    """Raise if the cure was saved from another architecture."""
    layout: Any = entry.layout
    stack = backbones.find(_root(model, entry), modules=entry.modules, part=entry.part, layout=layout)
    saved = (entry.architecture, entry.blocks)
    given = (stack.architecture, len(stack.blocks))
    if saved != given:
        raise ValueError(
            f"The cure belongs to another architecture: {saved[0]} with {saved[1]} blocks; this model is {given[0]} "
            f"with {given[1]} blocks."
        )


def _fill(done: tuple[Attachment, ...], weights: Mapping[str, Tensor]) -> None:
    """Copy saved weights into the cures."""
    own = _weights(done)
    shapes = [{key: tuple(tensor.shape) for key, tensor in side.items()} for side in (weights, own)]
    wrong = next((key for key in {**shapes[1], **shapes[0]} if shapes[0].get(key) != shapes[1].get(key)), None)
    if wrong is not None:
        saved, here = (str(side.get(wrong, "nothing")) for side in shapes)
        raise ValueError(f"The saved cure does not fit this model: {wrong} has shape {saved} in the file, {here} here.")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(weights[key])


def _read(folder: Path) -> tuple[list[Entry], dict[str, Tensor]]:
    """Read both files, if they belong together."""
    if not (folder / DESCRIPTION).is_file():
        raise FileNotFoundError(_missing(folder, DESCRIPTION))
    try:
        described = typed_json.parse((folder / DESCRIPTION).read_bytes())
        schema = described["schema"]
        if type(schema) is int and schema != SCHEMA:
            raise ValueError(f"it has schema {schema}, and this version of uncollapse reads {SCHEMA}")
        entries = [typed_json.build(Entry, entry, "a cure") for entry in described["cures"]]
        digest = described["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / DESCRIPTION} does not describe a cure: {error}.") from error
    try:
        return entries, safetensors.torch.load(_read_weights(folder, digest))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is not an intact safetensors file: {error}.") from error


def _read_weights(folder: Path, digest: Any) -> bytes:
    """Return the weights with this digest. A save that was killed at its end left them under another name."""
    found = False
    for path in (folder / WEIGHTS, folder / WAITING, folder / WEIGHTS):  # a save may rename them right now
        if path.is_file():
            found, content = True, path.read_bytes()
            if digest == hashlib.sha256(content).hexdigest():
                return content
    if not found:
        raise FileNotFoundError(_missing(folder, WEIGHTS))
    raise ValueError(f"{folder / WEIGHTS} does not match {DESCRIPTION}: one of the two files was replaced.")


def _missing(folder: Path, name: str) -> str:
    return (
        f"{folder} holds no saved cure: there is no {name}, which uc.save_cure writes. If the cure's weights are in a "
        "checkpoint of the model, as with a Trainer, attach the cure with the same options as before and load them "
        "with model.load_state_dict."
    )
