"""Models of timm and their preprocessing."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, did_you_mean, import_optional
from uncollapse.io import hf_models
from uncollapse.io.files import read_config
from uncollapse.io.loading import fixed_seed, silence_libraries
from uncollapse.io.untrusted_models import check_folder, check_size

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
WAY_OUT = "--random-weights measures the architecture without them, --checkpoint FILE takes yours."


def load_timm_model(name: str, *, random_weights: bool, way_out: str = WAY_OUT) -> nn.Module:
    """Load a model by timm's name, with its published weights or random ones.

    way_out: advice for the error if there are no weights.
    """
    check_name(name)
    timm = _timm()
    try:
        weights = {} if random_weights else _weight_options(timm, name, way_out)
        with silence_libraries(), fixed_seed():
            model: nn.Module = timm.create_model(name, pretrained=not random_weights, **weights)
    except RuntimeError as error:  # such as a tag of weights that the model does not have
        raise UsageError(f"timm cannot build {name!r}: {' '.join(str(error).split())}") from error
    return model


def is_folder(path: Path) -> bool:
    """Return whether a folder has a model in timm's format, as `uncollapse train vit --save` writes it."""
    if not (path / "config.json").exists():
        return False
    facts = read_config(path / "config.json")
    return isinstance(facts, dict) and "architecture" in facts and "pretrained_cfg" in facts


def load_timm_folder(folder: Path, *, random_weights: bool) -> nn.Module:
    """Load the model of a folder in timm's format."""
    check_folder(folder)
    build = partial(_timm().create_model, f"local-dir:{folder}")
    try:
        with silence_libraries(), fixed_seed():
            check_size(build, str(folder))
            model: nn.Module = build(pretrained=not random_weights)
    except UsageError:
        raise
    except Exception as error:  # an edited config.json raises many kinds of errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"timm cannot load the model in {folder}: {reason[:300]}") from error
    return model


def check_name(name: str, families: Iterable[str] = ("",)) -> None:
    """Raise if timm has no model with this name. families: modules of timm whose models are suggested; "" is all."""
    timm = _timm()
    if not timm.is_model(name):
        known = [each for family in families for each in timm.list_models(module=family)]
        architecture = name.partition(".")[0]
        longer = [each for each in known if each.startswith(architecture)]  # a name that is only begun
        hint = did_you_mean(architecture, longer or known, most=3)
        raise UsageError(f"timm has no model {name!r}.{hint or ' timm.list_models() returns all names.'}")


def timm_image_reader(model: nn.Module) -> Callable[[Sequence[Any]], Tensor]:
    """Return a function that preprocesses images as the model expects, into its input."""
    _timm()
    data: Any = import_optional("timm.data", "timm")
    transform = data.create_transform(**data.resolve_model_data_config(model))

    def read(images: Sequence[Any]) -> Tensor:
        return torch.stack([transform(image) for image in images])

    return read


def _timm() -> Any:
    torchvision_ops.declare()
    with silence_libraries():
        return import_optional("timm", "timm")


def _weight_options(timm: Any, name: str, way_out: str) -> dict[str, Any]:
    """Return options that say where timm finds the weights; UsageError if there are none."""
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
        raise UsageError(f"The weights of {name!r} cannot be downloaded from the hub now; {way_out}")
    return {}
