"""EmbeddingTransform against naive references in float64, its refusals, merging, storage and interface."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import uncollapse as uc
from uncollapse.embeddings.geometry import Geometry, Scatter, advise
from uncollapse.errors import UsageError

ROWS, DIM = 400, 12


@pytest.fixture
def x() -> Tensor:
    """Rows that share a mean and three strong directions."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, DIM, generator=random, dtype=torch.float64)
    rows[:, :3] *= torch.tensor([9.0, 6.0, 4.0])
    return rows @ torch.linalg.qr(torch.randn(DIM, DIM, generator=random, dtype=torch.float64)).Q + 3


def naive(x: Tensor, method: str, k: int = 2, shrinkage: float = 0.1) -> Tensor:
    """The methods from their definitions, by the singular vectors of the centered rows."""
    centered = x - x.mean(0)
    directions = torch.linalg.svd(centered, full_matrices=False).Vh
    if method == "center":
        return centered
    if method == "all_but_the_top":
        for direction in directions[:k]:
            centered = centered - torch.outer(centered @ direction, direction)
        return centered
    if method == "pca":
        return centered @ directions[:k].T
    covariance = centered.T @ centered / len(x)
    shrunk = (1 - shrinkage) * covariance + shrinkage * covariance.trace() / x.shape[1] * torch.eye(
        x.shape[1], dtype=x.dtype
    )
    values, vectors = torch.linalg.eigh(shrunk)
    return centered @ vectors @ torch.diag(values**-0.5) @ vectors.T


@pytest.mark.parametrize("method", ["center", "all_but_the_top", "whiten", "pca"])
def test_methods_are_their_definitions(x: Tensor, method: Any) -> None:
    transform = uc.EmbeddingTransform(method, k=2, dims=2, shrinkage=0.1)
    found, expected = transform.fit_transform(x), naive(x, method)
    if method == "pca":  # directions have no sign
        found, expected = found.abs(), expected.abs()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    halves = torch.cat([transform.transform(x[:7]), transform.transform(x[7:])])
    torch.testing.assert_close(halves.abs() if method == "pca" else halves, expected, rtol=1e-9, atol=1e-9)


def test_whitened_rows_have_the_identity_as_covariance(x: Tensor) -> None:
    white = uc.EmbeddingTransform("whiten", shrinkage=0.0).fit_transform(x)
    torch.testing.assert_close(white.T @ white / len(x), torch.eye(DIM, dtype=torch.float64))


@pytest.mark.parametrize("rows", [30, 400])
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_the_shrinkage_is_that_of_ledoit_and_wolf(rows: int, offset: float) -> None:
    ledoit_wolf = pytest.importorskip("sklearn.covariance").ledoit_wolf
    x = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(1) + offset
    scatter = Scatter(DIM)
    scatter.update(x)
    assert scatter.shrinkage() == pytest.approx(ledoit_wolf(x.numpy())[1], rel=1e-6)
    transform = uc.EmbeddingTransform("whiten").fit(x)
    assert transform.shrinkage_ == pytest.approx(scatter.shrinkage())


def test_a_shrinkage_that_rounding_would_decide_is_refused(x: Tensor) -> None:
    """Rows far from 0 leave no digit of their spread in fourth powers; the weight came out as 0."""
    far = x + 1e6
    with pytest.raises(UsageError, match="pass shrinkage"):
        uc.EmbeddingTransform("whiten").fit_transform(far)
    uc.EmbeddingTransform("whiten", shrinkage=0.1).fit_transform(far)
    uc.EmbeddingTransform("whiten").fit_transform(far - far.mean(0))


@pytest.mark.parametrize("method", ["all_but_the_top", "whiten", "pca"])
def test_autocast_does_not_round_the_map(x: Tensor, method: Any) -> None:
    transform = uc.EmbeddingTransform(method, dims=3 if method == "pca" else None).fit(x)
    rows = x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = transform.transform(rows)
    assert torch.equal(found, transform.transform(rows))


def test_equal_rows_shrink_to_nothing_and_stay_finite() -> None:
    rows = torch.ones(60, 4)
    for method in ("center", "all_but_the_top", "whiten"):
        assert uc.EmbeddingTransform(method, k=1).fit_transform(rows).abs().max() == 0  # type: ignore[arg-type]
    assert uc.EmbeddingTransform("auto").fit(rows).method_ == "all_but_the_top"


def test_merging_parts_is_fitting_to_all_rows(x: Tensor) -> None:
    whole, streamed = uc.EmbeddingTransform("whiten").fit(x), uc.EmbeddingTransform("whiten").fit(x.split(37))
    parts = [uc.EmbeddingTransform("whiten").fit(part) for part in (x[:100], x[100:150], x[150:])]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    for other in (streamed, merged):
        torch.testing.assert_close(other.transform(x), whole.transform(x), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="same arguments"):
        whole.merge(uc.EmbeddingTransform("center").fit(x))


def test_kinds_of_rows(x: Tensor) -> None:
    transform = uc.EmbeddingTransform("all_but_the_top", k=2).fit(x)
    expected = transform.transform(x)
    for dtype, close in ((torch.float32, 1e-4), (torch.float16, 0.05), (torch.bfloat16, 0.3)):
        found = transform.transform(x.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    array = transform.transform(x.numpy())
    assert isinstance(array, numpy.ndarray)
    numpy.testing.assert_allclose(array, expected.numpy())
    assert transform.transform(x[0]).shape == (DIM,)
    assert transform.transform(x.view(20, 20, DIM)).shape == (20, 20, DIM)


@pytest.mark.parametrize(
    ("arguments", "rows", "word"),
    [
        ({"method": "whiten"}, 20, "24 rows"),
        ({"method": "all_but_the_top", "k": 5}, 40, "50 rows"),
        ({"method": "all_but_the_top", "k": 12}, 400, "from 1 to 11"),
        ({"method": "all_but_the_top", "k": 0}, 400, "from 1 to 11"),  # not as if it were not given
        ({"method": "pca"}, 400, "dims"),
        ({"method": "pca", "dims": 13}, 400, "from 1 to 12"),
        ({"method": "whitten"}, 400, "whiten"),
        ({"method": "whiten", "shrinkage": 2.0}, 400, "shrinkage"),
    ],
)
def test_what_cannot_be_done_is_refused(x: Tensor, arguments: Any, rows: int, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        uc.EmbeddingTransform(**arguments).fit(x[:rows]).transform(x)


def test_wrong_arguments_are_refused_before_all_rows_are_read(x: Tensor) -> None:
    with pytest.raises(UsageError, match="dims"):
        uc.EmbeddingTransform("pca").partial_fit(x)


def test_rows_that_do_not_fit(x: Tensor) -> None:
    transform = uc.EmbeddingTransform("center")
    with pytest.raises(ValueError, match="fit"):
        transform.transform(x)
    with pytest.raises(ValueError, match="features"):
        transform.fit(x).transform(x[:, :5])
    with pytest.raises(ValueError, match="shape"):
        transform.fit(x[0])
    with pytest.raises(UsageError, match="Project"):
        transform.fit(torch.zeros(3, 10**6))
    for bad in (torch.nan, 1e80):  # the fourth power of the second is beyond float64
        with pytest.raises(ValueError, match="finite"):
            transform.fit(x.masked_fill(x > 3, bad))


def test_auto_leaves_rows_alone_that_are_not_alike() -> None:
    random = torch.Generator().manual_seed(2)
    rows = torch.randn(300, 16, generator=random)
    apart, alike = uc.EmbeddingTransform().fit(rows), uc.EmbeddingTransform().fit(rows + 4)
    assert (apart.method_, alike.method_) == ("none", "all_but_the_top")
    assert torch.equal(apart.transform(rows), rows)
    assert apart.advice_.method == "none"
    assert apart.geometry_ == Geometry(300, 16, pytest.approx(float(uc.mean_cosine(rows.double()))))
    assert advise(Geometry(5, 300, 0.9)).method == "center"


def test_saved_and_loaded(x: Tensor, tmp_path: Path) -> None:
    for method in ("auto", "center", "all_but_the_top", "whiten", "pca"):
        transform = uc.EmbeddingTransform(method, k=2, dims=3).fit(x)  # type: ignore[arg-type]
        loaded = uc.EmbeddingTransform.load(transform.save(tmp_path / method))
        assert torch.equal(loaded.transform(x), transform.transform(x))
        assert (loaded.get_params(), loaded.method_) == (transform.get_params(), transform.method_)
    with pytest.raises(ValueError, match="loaded"):
        loaded.merge(loaded)


@pytest.mark.parametrize("damage", ["missing", "json", "type", "shape"])
def test_other_folders_are_refused(x: Tensor, tmp_path: Path, damage: str) -> None:
    folder = uc.EmbeddingTransform("pca", dims=3).fit(x).save(tmp_path / "t")
    config = json.loads((folder / "config.json").read_text())
    if damage == "missing":
        (folder / "model.safetensors").unlink()
    elif damage == "json":
        (folder / "config.json").write_text("{")
    elif damage == "type":
        (folder / "config.json").write_text(json.dumps(config | {"type": "Dense"}))
    else:
        uc.EmbeddingTransform("center").fit(x[:, :4]).save(tmp_path / "other")
        (tmp_path / "other" / "config.json").write_text((folder / "config.json").read_text())
        (folder / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(UsageError, match="transform"):
        uc.EmbeddingTransform.load(folder)


def test_it_is_an_estimator_of_scikit_learn(x: Tensor) -> None:
    base = pytest.importorskip("sklearn.base")
    pipeline = pytest.importorskip("sklearn.pipeline")
    transform = uc.EmbeddingTransform("all_but_the_top", k=2)
    twin = base.clone(transform)
    assert twin.get_params() == transform.get_params()
    assert repr(twin) == "EmbeddingTransform(method='all_but_the_top', k=2)"
    line = pipeline.make_pipeline(transform, uc.EmbeddingTransform("pca", dims=4))
    assert line.fit_transform(x.numpy()).shape == (ROWS, 4)
    assert twin.set_params(k=3).fit(x).transform(x).shape == x.shape
    with pytest.raises(ValueError, match="dims"):
        twin.set_params(dim=3)
