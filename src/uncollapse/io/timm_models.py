"""Models of timm and their preprocessing."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, did_you_mean, import_optional
from uncollapse.io import hf_models
from uncollapse.io.loading import fixed_seed, silence_libraries

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
WAY_OUT = "--random-weights measures the architecture without them, --checkpoint FILE takes yours."


def load_timm_model(name: str, *, random_weights: bool, way_out: str = WAY_OUT) -> nn.Module:
    """A model by timm's name, with its published weights unless random ones are wanted.

    way_out: what to do where there are no weights, said in the error.
    """
    check_name(name)
    timm = _timm()
    try:
        weights = {} if random_weights else _weights(timm, name, way_out)
        with silence_libraries(), fixed_seed():
            model: nn.Module = timm.create_model(name, pretrained=not random_weights, **weights)
    except RuntimeError as error:  # such as a tag of weights that the model does not have
        raise UsageError(f"timm cannot build {name!r}: {' '.join(str(error).split())}") from error
    return model


def is_folder(path: Path) -> bool:
    """Whether a folder has a model as timm keeps it, such as `uncollapse train vit --save` writes."""
    try:
        facts = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and "architecture" in facts and "pretrained_cfg" in facts


def load_timm_folder(folder: Path, *, random_weights: bool) -> nn.Module:
    """The model in a folder of timm's."""
    try:
        with silence_libraries(), fixed_seed():
            model: nn.Module = _timm().create_model(f"local-dir:{folder}", pretrained=not random_weights)
    except UsageError:
        raise
    except Exception as error:  # a config.json that somebody changed makes timm raise a dozen kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"timm cannot load the model in {folder}: {reason[:300]}") from error
    return model


def check_name(name: str) -> None:
    """Raise if timm has no model of this name."""
    timm = _timm()
    if not timm.is_model(name):
        hint = did_you_mean(name.partition(".")[0], timm.list_models(), most=3)
        raise UsageError(f"timm has no model {name!r}.{hint}")


def timm_image_reader(model: nn.Module) -> Callable[[Sequence[Any]], Tensor]:
    """Pictures -> the input of the model, with the preprocessing that belongs to it."""
    _timm()
    data: Any = import_optional("timm.data", "timm")
    transform = data.create_transform(**data.resolve_model_data_config(model))

    def read(pictures: Sequence[Any]) -> Tensor:
        return torch.stack([transform(picture) for picture in pictures])

    return read


def _timm() -> Any:
    torchvision_ops.declare()
    with silence_libraries():
        return import_optional("timm", "timm")


def _weights(timm: Any, name: str, way_out: str) -> dict[str, Any]:
    """Where timm shall take the weights from; UsageError if there are none to be had."""
    facts = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    if facts is None or not facts.has_weights:
        raise UsageError(f"timm has no published weights of {name!r}; {way_out}")
    if not facts.hf_hub_id:
        return {}
    import huggingface_hub

    stored = (huggingface_hub.try_to_load_from_cache(facts.hf_hub_id, file) for file in WEIGHTS)
    cached = next((path for path in stored if isinstance(path, str)), None)
    if cached is not None:
        return {"pretrained_cfg_overlay": {"file": cached}}
    if not hf_models.is_on_hub(facts.hf_hub_id):
        raise UsageError(f"The weights of {name!r} cannot be fetched from the hub now; {way_out}")
    return {}
