"""Load image encoders that runs of contrast, circle and moco saved."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from uncollapse.errors import UsageError
from uncollapse.io.files import expand_user
from uncollapse.io.tensor_files import load_into, weights_of
from uncollapse.lab.config.fields import build, config_fields
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive.config import EncoderConfig
from uncollapse.lab.experiments.moco import config as moco
from uncollapse.lab.experiments.moco.config import MomentumConfig
from uncollapse.lab.runs.saved_models import CONFIG, WEIGHTS, read_json

HEAD = "head"  # the classifier that the recipe circle trains with labels


class SavedEncoder(NamedTuple):
    """An encoder in evaluation mode, and the configuration of its run."""

    encoder: Any
    config: EncoderConfig


def load_encoder(folder: str | Path) -> SavedEncoder:
    """Return the encoder that a run with --save wrote in a folder, see `saved_models.save_weights`."""
    folder = expand_user(folder)
    config = _read_config(folder)
    encoder = moco.build_encoder(config) if isinstance(config, MomentumConfig) else contrastive.build_encoder(config)
    path = folder / WEIGHTS
    if not path.is_file():
        raise UsageError(f"{folder} holds no whole model: {WEIGHTS} is missing. Keep the model again.")
    labelled = weights_of(path, encoder).get(f"{HEAD}.weight")
    if labelled is not None and labelled.dim() == 2:
        encoder.add_module(HEAD, nn.Linear(labelled.shape[1], labelled.shape[0]))
    load_into(encoder, path)
    return SavedEncoder(encoder.eval(), config)


def _read_config(folder: Path) -> EncoderConfig:
    """Return the configuration of the run; fields that do not concern the encoder may be of any recipe."""
    found = read_json(folder / CONFIG)
    if not {"dim", "side", "width"} <= found.keys():
        raise UsageError(
            f"{folder} has a saved model of another kind; expected an encoder of contrast, circle or moco."
        )
    kind = MomentumConfig if "ema" in found else EncoderConfig
    known = config_fields(kind)
    config: EncoderConfig = build(kind, {name: value for name, value in found.items() if name in known})
    return config
