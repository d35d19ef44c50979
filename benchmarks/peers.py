"""Next to libraries that do a part of the same work: checked to give the same, then timed in turn in one process.

A library that is not installed is skipped, with a line that says so. The losses of lightly and
pytorch-metric-learning are in the group `hypersphere`.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import uncollapse as uc
from benchmarks.diagnosing import minilm
from benchmarks.measure import training_step
from benchmarks.targets import Result, faster
from uncollapse.backbones import torchvision_ops
from uncollapse.diagnosis.embeddings import RowStatistics

TEMPERATURE = 0.05  # sentence-transformers' scale of 20
TEXTS, LENGTH = 8, 256
EMBEDDINGS, DIM = 7680, 384  # four of IncrementalPCA's own batches


def beside_peers() -> Iterator[Result]:
    torch.manual_seed(0)
    for module, rows in PEERS.items():
        if (library := load(module)) is not None:
            yield from rows(library)


def load(module: str) -> Any:
    """Return a library, or None, after saying why, where it cannot be imported."""
    torchvision_ops.declare()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        Console(stderr=True).print(f"Skipped {module}: {error}. pip install 'uncollapse[bench]'", highlight=False)
        return None


def cached_ranking(losses: Any, batch: int = 4096) -> Iterator[Result]:
    """The loss over the embeddings of a batch, as both compute it in chunks, without the encoder around it."""
    loss = losses.CachedMultipleNegativesRankingLoss(nn.Sequential(nn.Identity()), scale=1 / TEMPERATURE)
    x = torch.randn(batch, DIM)
    y = x + torch.randn(batch, DIM)

    def theirs(x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = loss.calculate_loss([[x], [y]])
        return value

    yield beside(
        f"InfoNCE {batch}×{DIM}, sentence-transformers' CachedMultipleNegativesRankingLoss", theirs, info_nce, x, y
    )

    def cached() -> None:
        leaves = [x.detach().requires_grad_(), y.detach().requires_grad_()]
        loss.calculate_loss([[leaf] for leaf in leaves], with_backward=True)

    name = "  its backward pass chunk by chunk, as in its training"
    yield _theirs(faster(name, None, cached, training_step(info_nce, x, y), rounds=3))


def keops(library: Any, rows: int = 2048, width: int = 64) -> Iterator[Result]:
    """Softmax means over all pairs; the first call compiles, and is not timed."""

    def theirs(x: Tensor) -> Tensor:
        logits = (library.LazyTensor(x[:, None]) * library.LazyTensor(x[None])).sum(-1)
        mean: Tensor = logits.sumsoftmaxweight(library.LazyTensor(x[None].contiguous()), dim=1)
        return mean

    x = torch.randn(rows, width) / width**0.5
    yield beside(f"softmax_mean {rows}×{width}, KeOps", theirs, lambda x: uc.pairwise.softmax_mean(x, x, x), x)


def incremental_pca(decomposition: Any) -> Iterator[Result]:
    """The spectrum of embeddings that come in parts."""
    x = torch.randn(EMBEDDINGS, 48) @ torch.randn(48, DIM) / 7 + 0.2 * torch.randn(EMBEDDINGS, DIM) + 0.3
    rows = x.half()

    def theirs() -> Any:
        return decomposition.IncrementalPCA().fit(rows.float().numpy())

    def ours() -> RowStatistics:
        statistics = RowStatistics(DIM)
        statistics.update(rows)
        return statistics

    moments = ours()._moments
    assert moments is not None
    expected = torch.from_numpy(theirs().singular_values_)
    torch.testing.assert_close(moments.spectrum(center=True), expected.double(), rtol=1e-3, atol=0)
    found = faster(f"moments of embeddings {EMBEDDINGS}×{DIM}, scikit-learn's IncrementalPCA", 1.0, theirs, ours, 3)
    rate = EMBEDDINGS * 1e3 / float(found.detail.split()[0])
    yield replace(_theirs(found), detail=f"{_theirs(found).detail}; {rate:,.0f} rows/s theirs")


def condensation(library: Any) -> Iterator[Result]:
    """The mean cosine of each layer; theirs comes from matrices of all pairs. Texts go through one by one."""
    model = minilm()
    texts = [torch.randint(1000, 30000, (1, LENGTH)) for _ in range(TEXTS)]

    def theirs() -> Any:
        return library.measure_embedding_condensation(
            model,
            lambda number, **_: {"input_ids": texts[number]},
            texts=range(TEXTS),
            repetitions=TEXTS,
            plot=False,
            save_path=None,
            show_progress=False,
        )

    @torch.no_grad()
    def cosines() -> Tensor:
        with uc.tokens(model, layers=":") as tokens:
            found = []
            for text in texts:
                model(text)
                found.append(torch.cat([uc.mean_cosine(tokens[number]) for number in range(6)]))
        return torch.stack(found).mean(0)

    def diagnosis() -> uc.Diagnosis:
        return uc.diagnose(model, [{"input_ids": text} for text in texts], plan=uc.Plan(baseline=0))

    matrices = torch.from_numpy(theirs().cossim_by_layer)[1:]  # the first is that of the embeddings
    expected = (matrices.sum((1, 2)) - LENGTH) / (LENGTH * (LENGTH - 1))
    torch.testing.assert_close(cosines(), expected, rtol=1e-4, atol=1e-4)
    name = f"mean cosine of each layer, MiniLM-L6, {TEXTS} texts of {LENGTH} tokens, embedding-condensation"
    yield _theirs(faster(name, 1.0, theirs, cosines, rounds=3))
    yield _theirs(faster("  a diagnosis, with all its measures, instead", None, theirs, diagnosis, rounds=3))


def nnsight(library: Any) -> Iterator[Result]:
    """The output of every block of a forward pass."""
    model, batch = minilm(), {"input_ids": torch.randint(1000, 30000, (4, 128))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # blocks of BERT have a part named `output`
        wrapped = library.NNsight(model)
    blocks = range(len(wrapped.encoder.layer))

    @torch.no_grad()
    def theirs() -> list[Tensor]:
        with wrapped.trace(**batch):
            outputs: Any = [wrapped.encoder.layer[number].output.save() for number in blocks]
            outputs.save()
        return list(outputs)

    @torch.no_grad()
    def ours() -> list[Tensor]:
        with uc.tokens(model, layers=":") as tokens:
            model(**batch)
            return [tokens[number] for number in blocks]

    for expected, found in zip(theirs(), ours(), strict=True):
        torch.testing.assert_close(found, expected)
    yield _theirs(faster("tokens of every block, MiniLM-L6, 4×128, nnsight", 1.0, theirs, ours, rounds=9))


def beside(name: str, theirs: Callable[..., Tensor], ours: Callable[..., Tensor], *inputs: Tensor) -> Result:
    """Forward and backward of two functions that give the same."""
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), theirs(*inputs), rtol=1e-4, atol=1e-4)
    return _theirs(faster(name, 1.0, training_step(theirs, *inputs), training_step(ours, *inputs), rounds=3))


def info_nce(x: Tensor, y: Tensor) -> Tensor:
    return uc.info_nce(x, y, temperature=TEMPERATURE)


def _theirs(result: Result) -> Result:
    return replace(result, detail=result.detail.replace("plain", "theirs"))


PEERS: dict[str, Callable[[Any], Iterator[Result]]] = {
    "sentence_transformers.sentence_transformer.losses": cached_ranking,
    "pykeops.torch": keops,
    "sklearn.decomposition": incremental_pca,
    "embedding_condensation": condensation,
    "nnsight": nnsight,
}
