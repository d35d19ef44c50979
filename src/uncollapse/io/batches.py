"""Make the batches on which a model is measured: from text, images, graphs, or the built-in data."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uncollapse.backbones import forward
from uncollapse.backbones.sites import Stack
from uncollapse.errors import UsageError, similar_file
from uncollapse.io import graphs, images, models
from uncollapse.io.files import expand_user
from uncollapse.io.models import LoadedModel

LENGTH = 128  # tokens of a text, unless asked otherwise
LIMIT = 512  # and at most so many for a SentenceTransformer, which has a length of its own
BATCHES = "pass --batches module:function or file.py:function."  # ends errors about unknown data


def built_in_sentences() -> list[str]:
    """Return the 120 plain English sentences that come with the package."""
    return _non_blank((files("uncollapse.io") / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines())


def read_lines(source: str, limit: int | None = None) -> list[str]:
    """Return the texts of a file, one per line, or of the standard input for "-"; blank lines are skipped."""
    try:
        if source == "-":
            lines = _non_blank(sys.stdin, limit)
        else:
            with expand_user(source).open(encoding="utf-8") as file:
                lines = _non_blank(file, limit)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not valid UTF-8: {error.reason} at byte {error.start}. --text takes a text file in UTF-8."
        ) from error
    except OSError as error:
        raise UsageError(f"The text {source} cannot be read: {error.strerror}.") from error
    if not lines:
        raise UsageError(f"{'The standard input' if source == '-' else source} has no text; expected one per line.")
    return lines


def _non_blank(lines: Iterable[str], limit: int | None = None) -> list[str]:
    return list(islice((line.strip() for line in lines if line.strip()), limit))


def token_limit(tokenizer: Any, model: Any, max_length: int | None, usual: int = LENGTH) -> int:
    """Return how many tokens a text may have: `max_length`, or the usual number within what the model can read."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length, positions]
    most: int = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=LIMIT)
    if max_length is not None and not 0 < max_length <= most:
        raise UsageError(f"--max-length must be from 1 to {most} for this model, got {max_length}.")
    return min(most, max_length or usual)


def token_batches(
    texts: list[str], tokenizer: Any, *, batch_size: int, max_length: int, decoder: bool
) -> Iterator[Any]:
    """Yield arguments of the model: input_ids, attention_mask and what else the tokenizer returns, padded on the right.

    decoder: pass the same tokens to the decoder as well, for encoder-decoder models.
    """
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        encoded = tokenizer(part, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        if decoder:
            encoded["decoder_input_ids"] = encoded["input_ids"]
            encoded["decoder_attention_mask"] = encoded["attention_mask"]
        yield encoded


def known_tokens(batches: Iterable[Any], model: Any) -> Iterator[Any]:
    """Yield the batches; raise a UsageError for a token that the model's vocabulary does not have."""
    try:
        size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):
        size = None
    for batch in batches:
        ids = batch["input_ids"]
        if size is not None and ids.numel() and int(ids.max()) >= size:
            raise UsageError(
                f"The tokenizer gives the token {int(ids.max())}, and the model has {size} of them: they do not belong "
                "together. Put the files of the model's own tokenizer next to it."
            )
        yield batch


def example_tokens(text: str, tokenizer: Any, max_length: int) -> tuple[str, ...]:
    """Return the tokens of a text, decoded one by one."""
    ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
    return tuple(tokenizer.decode([number]) for number in ids)


def unknown_share(texts: list[str], tokenizer: Any, max_length: int) -> float:
    """Return the share of unknown tokens in up to 256 texts. UsageError if it is above one half.

    Unknown tokens are all alike, which looks like collapse.
    """
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    ids = tokenizer(texts[:: -(-len(texts) // 256)], truncation=True, max_length=max_length)["input_ids"]
    real = [number for row in ids for number in row if number not in special]
    if not real:
        raise UsageError(
            "The tokenizer finds no tokens in the text: the folder of the model probably has no tokenizer. Save it "
            "there too, or pass --batches module:function."
        )
    if tokenizer.unk_token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        return 0.0
    unknown: int = sum(number == tokenizer.unk_token_id for number in real)
    if 2 * unknown > len(real):
        raise UsageError(
            f"The tokenizer does not know {unknown} of {len(real)} tokens. If the folder of the model has no "
            "tokenizer, save it there too; otherwise pass text of the kind that the model reads with --text, or pass "
            "--batches module:function if the model has another tokenizer."
        )
    return unknown / len(real)


Kind = Literal["text", "images", "graph"]


@dataclass(frozen=True)
class DataRequest:
    """The requested data: at most one of text, images, graph and batches; built-in data without any.

    usual_length: largest number of tokens of a text if max_length is not given and the model can read so many.

    Everything that does not depend on the model is checked at once, because models may take long to load.
    """

    text: str | None = None
    images: Path | None = None
    graph: str | None = None
    batches: str | None = None
    data_root: Path | None = None
    batch_size: int = 32
    max_length: int | None = None
    max_batches: int | None = None
    usual_length: int = LENGTH

    def __post_init__(self) -> None:
        """Raise if several kinds are requested, or something that does not exist."""
        if len(self.kinds) > 1:
            raise UsageError(f"{' and '.join('--' + kind for kind in self.kinds)} exclude each other; choose one.")
        if self.text and self.text != "-" and not expand_user(self.text).is_file():
            close = similar_file(expand_user(self.text))
            raise UsageError(f"There is no text file {self.text}; --text takes a file with one text per line.{close}")
        if self.images and not self.images.is_dir():
            raise UsageError(f"There is no folder {self.images}; --images takes a folder with image files.")
        if self.graph:
            graphs.check_graph_name(self.graph)

    @property
    def kinds(self) -> list[str]:
        """Requested kinds of data."""
        return [kind for kind in ("text", "images", "graph", "batches") if getattr(self, kind)]

    @property
    def limit(self) -> int | None:
        """Largest number of samples that is needed; None for all."""
        return None if self.max_batches is None else self.max_batches * self.batch_size


@dataclass(frozen=True)
class Data:
    """Batches for a model. words: a description. total: how many there are; None if unknown.

    built_in: whether they came with the package. example: the tokens of the first text. call: runs the model on a
    batch. unknown: the share of tokens that the tokenizer does not know. unreadable: files that were skipped, filled
    while the batches are read.
    """

    batches: Iterable[Any]
    words: str
    total: int | None
    built_in: bool = False
    example: tuple[str, ...] = ()
    call: forward.Call = forward.run
    unknown: float = 0.0
    unreadable: list[Path] = field(default_factory=list)


def load_data(loaded: LoadedModel, stack: Stack, request: DataRequest) -> Data:
    """Return the requested data as batches for the model; built-in data of its kind if nothing was requested."""
    if request.batches:
        return _own_batches(request.batches, request.max_batches)
    needed = _kind(loaded.model, stack)
    kind = next(iter(request.kinds), needed)
    if kind is None:
        raise UsageError(f"The kind of data that {loaded.name} reads is not known; {BATCHES}")
    if needed is not None and kind != needed:
        raise UsageError(f"{loaded.name} reads {_noun(needed)}, so --{kind} does not fit; pass --{needed}.")
    return {"text": _text, "images": _images, "graph": _graph}[kind](loaded, stack, request)


def _kind(model: nn.Module, stack: Stack) -> Kind | None:
    """Return what a model reads, by the arguments of the part with the blocks or of the whole model."""
    if stack.layout == "nodes":
        return "graph"
    for module in (model.get_submodule(stack.path), model):
        if hasattr(module, "pretrained_cfg"):  # timm
            return "images"
        names = inspect.signature(module.forward).parameters
        by_name: dict[str, Kind] = {"pixel_values": "images", "input_ids": "text", "edge_index": "graph"}
        found = [kind for name, kind in by_name.items() if name in names]
        if len(found) == 1:
            return found[0]
    return None


def _noun(kind: str) -> str:
    return "graphs" if kind == "graph" else kind


def _own_batches(spec: str, most: int | None) -> Data:
    made = models.import_function(spec)()
    if not isinstance(made, Iterable):
        raise UsageError(f"{spec} must return an iterable of batches, got {type(made).__name__}.")
    total = len(made) if isinstance(made, Sized) else most
    return Data(made, f"batches of {spec}", total if total is None else min(total, most or total))


def _text(loaded: LoadedModel, stack: Stack, request: DataRequest) -> Data:
    from uncollapse.io import hf_models

    if loaded.origin is None:
        raise UsageError(f"Text needs a tokenizer, and {loaded.name} has none; pass --batches module:function.")
    texts = read_lines(request.text, request.limit) if request.text else built_in_sentences()[: request.limit]
    if forward.is_sentence_model(loaded.model):
        return _sentences(loaded.model, texts, request)
    tokenizer = hf_models.load_tokenizer(hf_models.Origin(loaded.origin))
    length = token_limit(tokenizer, loaded.model, request.max_length, request.usual_length)
    both = bool(getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False))
    batches = token_batches(texts, tokenizer, batch_size=request.batch_size, max_length=length, decoder=both)
    return Data(
        known_tokens(batches, loaded.model),
        _describe_texts(texts, request, length),
        _count(len(texts), request),
        built_in=not request.text,
        example=example_tokens(texts[0], tokenizer, length),
        unknown=unknown_share(texts, tokenizer, length),
        call=_call(loaded.model, stack),
    )


def _describe_texts(texts: list[str], request: DataRequest, length: int) -> str:
    source = "the standard input" if request.text == "-" else Path(request.text or "").name
    kind = f"texts of {source}" if request.text else "built-in sentences"
    return f"{len(texts)} {kind}, at most {length} tokens each"


def _sentences(model: Any, texts: list[str], request: DataRequest) -> Data:
    """Return batches of texts: a SentenceTransformer has its own tokenizer, length and prompt."""
    tokenizer, length = model.tokenizer, min(model.max_seq_length or LIMIT, LIMIT)
    if request.max_length is not None:
        length = token_limit(tokenizer, model.transformers_model, request.max_length)
    model.max_seq_length = length
    size = request.batch_size
    return Data(
        [texts[start : start + size] for start in range(0, len(texts), size)],
        _describe_texts(texts, request, length),
        _count(len(texts), request),
        built_in=not request.text,
        example=example_tokens(texts[0], tokenizer, length),
        unknown=unknown_share(texts, tokenizer, length),
    )


def _images(loaded: LoadedModel, stack: Stack, request: DataRequest) -> Data:
    unreadable: list[Path] = []
    if request.images:
        files = images.image_files(request.images)[: request.limit]
        opened, count = images.open_images(files, unreadable), len(files)
        words = f"the images of {request.images.resolve().name}"
    else:
        crops = images.built_in_crops()[: request.limit]
        opened, count = iter(crops), len(crops)
        words = f"{count} crops of scikit-learn's two photographs"
    return Data(
        _cast(images.image_batches(opened, _image_reader(loaded), request.batch_size), loaded.model),
        words,
        _count(count, request),
        built_in=not request.images,
        call=_call(loaded.model, stack),
        unreadable=unreadable,
    )


def _graph(loaded: LoadedModel, stack: Stack, request: DataRequest) -> Data:
    graph, words = graphs.load_graph(request.graph or "karate", request.data_root)
    facts = f"{graph.num_nodes} nodes, {graph.num_edges} directed edges"
    return Data(_cast([graph], loaded.model), f"{words} ({facts})", 1, built_in=not request.graph)


def _image_reader(loaded: LoadedModel) -> Any:
    from uncollapse.io import hf_models, timm_models

    if loaded.origin is not None:
        return hf_models.hf_image_reader(hf_models.Origin(loaded.origin))
    if hasattr(loaded.model, "pretrained_cfg"):
        return timm_models.timm_image_reader(loaded.model)
    raise UsageError(f"The image preprocessing of {loaded.name} is not known; {BATCHES}")


def _cast(batches: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    """Yield the batches with floating-point numbers in the dtype of the model's weights."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    for batch in batches:
        yield _in_dtype(batch, dtype)


def _in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_dtype(item, dtype) for key, item in value.items()}
    value.x = value.x.to(dtype)  # a graph
    return value


def _call(model: nn.Module, stack: Stack) -> forward.Call:
    """Return how to run the model: only the measured part, if it runs alone."""
    if not runs_alone(model, stack):
        return forward.run
    return lambda whole, batch: forward.run(whole.get_submodule(stack.path), batch)


def runs_alone(model: nn.Module, stack: Stack) -> bool:
    """Return whether a stack is a part of a HuggingFace model that has inputs of its own, such as a tower."""
    config = getattr(model, "config", None)
    return bool(stack.path and config is not None and not getattr(config, "is_encoder_decoder", False))


def _count(samples: int, request: DataRequest) -> int:
    return -(-samples // request.batch_size)
