"""Models, tokenizers and image processors of transformers."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from uncollapse.backbones import torchvision_ops
from uncollapse.backbones.random_weights import is_of_cure
from uncollapse.errors import UsageError, import_optional, similar_file
from uncollapse.io.files import expand_user
from uncollapse.io.loading import fixed_seed, silence_libraries
from uncollapse.io.untrusted_models import CONFIG_NAMES, bounded_size, check_folder, check_size

PACKAGE = "package:"
LENGTH = 600  # characters of an error that are shown
MOST_FOLDERS = 3  # of a package that an error names


class Origin:
    """Where a model's files are: a folder, a .gguf file, package:NAME/FOLDER for those in an installed package, or a
    name on the hub.
    """

    def __init__(self, place: str) -> None:
        place = in_package(place) if place.startswith(PACKAGE) else place
        path = expand_user(place)
        self.place = place
        self.options: dict[str, Any] = {"trust_remote_code": False}
        if path.suffix == ".gguf" and path.is_file():
            self.place, self.options["gguf_file"] = str(path.parent), path.name
        elif path.is_dir():
            self.place = str(path)
            ggufs = sorted(path.glob("*.gguf"))
            if len(ggufs) == 1 and not (path / "config.json").exists():
                self.options["gguf_file"] = ggufs[0].name
            elif not (path / "config.json").exists() and not (path / "modules.json").exists():
                raise UsageError(f"The folder {place} has no config.json; name the folder of a saved model.")
            check_folder(path)
        else:
            if not is_on_hub(place):
                self.options["local_files_only"] = True
            _check_hub_configs(place, "local_files_only" in self.options)


def in_package(place: str) -> str:
    """Return the folder that package:NAME/FOLDER names; the package is not imported."""
    name, _, folder = place.removeprefix(PACKAGE).partition("/")
    home = _package_folder(name)
    if home is None:
        raise UsageError(f"{place}: no package {name!r} is installed; write package:NAME/FOLDER of an installed one.")
    path = home / folder
    if not path.is_dir():
        raise UsageError(f"{place}: the package {name} has no folder {folder!r}.{_models_in(home, name)}")
    if not any(path.glob("*.gguf")) and not any((path / file).exists() for file in ("config.json", "modules.json")):
        raise UsageError(f"{place}: this folder of the package has no config.json.{_models_in(home, name)}")
    return str(path)


def _models_in(home: Path, name: str) -> str:
    """Return a sentence that names the models in a package, for errors; nothing if it has none."""
    models = sorted(file.parent for file in home.glob("**/config.json"))
    outer = [model for model in models if not any(parent in models for parent in model.parents)]  # no module of another
    names = [f"{PACKAGE}{name}/{model.relative_to(home).as_posix()}" for model in outer[:MOST_FOLDERS]]
    return f" Name a model in it: {', '.join(names)}." if names else ""


def _package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, by its name with "_" or, as it is installed, with "-"."""
    name = name.replace("-", "_")
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # the running script, and other modules that were never installed
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


@cache
def _check_hub_configs(place: str, is_local: bool) -> None:
    """Check the configs of a model on the hub as those of a folder. is_local: look into the cache only."""
    hub: Any = import_optional("huggingface_hub", "hf")
    try:
        folder = hub.snapshot_download(place, allow_patterns=CONFIG_NAMES, local_files_only=is_local)
    except Exception:  # it is not in the cache, or the connection broke: loading the model says so
        return
    check_folder(Path(folder))


def load_hf_model(
    origin: Origin, *, random_weights: bool, dtype: torch.dtype | None
) -> tuple[nn.Module, list[str], list[str]]:
    """Return the model without its head, the names of missing weights, which are random, and those of cures' weights.

    dtype: None keeps the dtype of the files.
    """
    with quiet_loading(origin) as transformers, fixed_seed():
        config = transformers.AutoConfig.from_pretrained(origin.place, **origin.options)
        if random_weights:
            build = partial(transformers.AutoModel.from_config, config, dtype=dtype or config.dtype or torch.float32)
            check_size(build, origin.place)
            return build(), [], []
        with bounded_size(origin.place, quantized=hasattr(config, "quantization_config")):
            model, report = transformers.AutoModel.from_pretrained(
                origin.place, dtype=dtype or "auto", output_loading_info=True, **origin.options
            )
    return model, sorted(key for key in report["missing_keys"] if not key.startswith("pooler.")), _of_cures(report)


def load_classifier(
    origin: Origin, labels: int, *, random_weights: bool = False, head_too: bool = False, **changes: Any
) -> nn.Module:
    """Return the model with a head for sequence classification, a new one if the files have none of that size.

    A new head is drawn from the caller's random state. Only the head and the pooling before it may be new: an encoder
    with missing weights, or weights of another shape, is refused.

    Args:
        origin: Where the model's files are.
        labels: Number of outputs of the head.
        random_weights: Draw all weights instead of reading them.
        head_too: Refuse a missing head as well.
        changes: Changed fields of the model's configuration, such as the number of layers.
    """
    with quiet_loading(origin) as transformers:
        config = transformers.AutoConfig.from_pretrained(origin.place, num_labels=labels, **origin.options)
        _change(config, changes, origin)
        kind = transformers.AutoModelForSequenceClassification
        if random_weights:
            build = partial(kind.from_config, config, dtype=torch.float32)
            check_size(build, origin.place)
            made: nn.Module = build()
            return made
        options = {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True, **origin.options}
        with bounded_size(origin.place, quantized=hasattr(config, "quantization_config")):
            made, report = kind.from_pretrained(origin.place, output_loading_info=True, **options)
    _check_whole(made, report, origin, head_too)
    return made


def _change(config: Any, changes: dict[str, Any], origin: Origin) -> None:
    lacking = [name for name in changes if not hasattr(config, name)]
    if lacking:
        raise UsageError(f"{origin.place}, a {config.model_type}, has no {lacking[0]} in its configuration to change.")
    for name, value in changes.items():
        setattr(config, name, value)


def _check_whole(model: Any, report: Any, origin: Origin, head_too: bool) -> None:
    """Raise if weights of the encoder were not in the files: it would be trained from random numbers."""
    lacking = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    encoder = f"{model.base_model_prefix}."
    if not head_too:
        lacking = {key for key in lacking if key.startswith(encoder) and not key.startswith(f"{encoder}pooler.")}
    if lacking:
        raise UsageError(
            f"{origin.place} does not have all weights of a {type(model).__name__}: {len(lacking)} are missing or of "
            f"another shape, such as {min(lacking)}. Check that it is the right model and that its files are complete."
        )


def _of_cures(report: Any) -> list[str]:
    return sorted(key for key in report["unexpected_keys"] if is_of_cure(key))


def load_tokenizer(origin: Origin) -> Any:
    """Return the tokenizer of the model; it pads on the right, with the end of a text if it has no padding token."""
    with quiet_loading(origin) as transformers:
        found = transformers.AutoTokenizer.from_pretrained(origin.place, **origin.options)
        found(["A"])  # settings of the wrong kind show when it is used
    if found.pad_token is None:
        found.pad_token = found.eos_token or found.unk_token
    if found.pad_token is None:
        raise UsageError(f"The tokenizer of {origin.place} has no padding token; pass --batches module:function.")
    found.padding_side = "right"
    return found


def hf_image_reader(origin: Origin) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Return a function that preprocesses images as the model expects, into its arguments."""
    with quiet_loading(origin) as transformers:
        processor = transformers.AutoImageProcessor.from_pretrained(origin.place, **origin.options)

    def read(images: Sequence[Any]) -> dict[str, Any]:
        return dict(processor(images=list(images), return_tensors="pt"))

    return read


@contextmanager
def quiet_loading(origin: Origin) -> Iterator[Any]:
    """Yield transformers with its output silenced; its errors become usage errors."""
    torchvision_ops.declare()
    with silence_libraries():
        transformers: Any = import_optional("transformers", "hf")
    try:
        with silence_libraries(transformers):
            yield transformers
    except UsageError:
        raise
    except Exception as error:  # a damaged folder raises many kinds of errors
        if origin.options.get("local_files_only"):
            if origin.place.endswith(".gguf"):
                raise UsageError(f"There is no file {origin.place}.{similar_file(Path(origin.place))}") from error
            package = f", or {PACKAGE}NAME/FOLDER in an installed package" if _package_folder(origin.place) else ""
            raise UsageError(
                f"{origin.place} is not a local folder, and the hub cannot be reached now; "
                f"name a folder with the saved model{package}, or connect and try again."
            ) from error
        raise UsageError(f"{origin.place} cannot be loaded: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    """Return what a library says, with the remedy that often follows its first sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return "it needs its own code, which is not run; build the model in a function and name module:function."
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}…"


NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TIMEOUT = 10.0  # seconds


def is_on_hub(repo: str) -> bool:
    """Return True if the hub has the repository, False if it cannot be reached; UsageError if the hub refuses it."""
    if not NAME.fullmatch(repo):
        raise UsageError(
            f"There is no folder {repo}, and it is not a valid name on the hub; "
            "name a folder with the saved model, or a model on the hub such as google-bert/bert-base-uncased."
        )
    huggingface_hub: Any = import_optional("huggingface_hub", "hf")
    errors: Any = import_optional("huggingface_hub.errors", "hf")
    api: Any = huggingface_hub.HfApi()
    try:
        api.model_info(repo, timeout=TIMEOUT)
    except errors.GatedRepoError as error:
        raise UsageError(f"{repo} is gated on the hub: accept its terms there and log in.") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"{repo} is neither a local folder nor a public model on the hub.") from error
    except Exception:  # offline mode, no connection, or a proxy that refuses: the cache may have it
        return False
    return True
