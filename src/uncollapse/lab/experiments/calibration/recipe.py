"""Check the choice of `EmbeddingTransform("auto")` against outcomes: real encoders, layer by layer, on real tasks."""

import time
from collections.abc import Callable
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.embeddings.transform import EmbeddingTransform
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.calibration.config import PAIRS, Config, Sentences, embed, load_encoder, load_sentences
from uncollapse.lab.experiments.training_run import with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import build_record, fingerprint, round_metrics

NAME = "calibration"
METHODS = ("none", "center", "all_but_the_top", "whiten")
Score = Callable[[NDArray[Any]], float]  # of the examples with these numbers, which may repeat


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
