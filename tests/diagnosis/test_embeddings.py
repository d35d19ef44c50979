"""Statistics of embeddings that parts gather apart: the whole is that of all rows, in any order and nesting."""

import math
import pickle
from functools import reduce
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import uncollapse as uc
from uncollapse.diagnosis import layer_measures
from uncollapse.diagnosis.embeddings import RowStatistics
from uncollapse.errors import NotFiniteError

EXACT = ("mean_cosine", "effective_rank", "dataset_rank", "token_variance", "feature_variance", "feature_correlation")
EXACT += ("outlier_share", "alignment")
SIZES = (1500, 40, 1, 700, 0, 259)
NARROW = {"sum": (11,), "gram": (11, 11), "unit_sum": (11,)}  # sums of rows with a feature less


def views(count: int = sum(SIZES), dim: int = 12) -> tuple[Tensor, Tensor]:
    """Rows of few dimensions around a mean, and their second views."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator) @ torch.randn(4, dim, generator=generator) + 0.5
    x = x + 0.3 * torch.randn(count, dim, generator=generator)
    return x, x + 0.2 * torch.randn(count, dim, generator=generator)


def parts_of(x: Tensor, y: Tensor | None, sizes: tuple[int, ...] = SIZES, **asked: float) -> list[RowStatistics]:
    found = []
    for seed, rows in enumerate(x.split(sizes)):
        one = RowStatistics(x.shape[1], seed=seed, **asked)
        pairs = None if y is None else y.split(sizes)[seed]
        for start in range(0, len(rows), 300):
            one.update(rows[start : start + 300], None if pairs is None else pairs[start : start + 300])
        found.append(one)
    return found


def same(a: RowStatistics, b: RowStatistics) -> bool:
    left, right = a.state(), b.state()
    return left.keys() == right.keys() and all(
        torch.equal(torch.as_tensor(left[name]), torch.as_tensor(right[name])) for name in left
    )


def test_merged_parts_give_the_diagnosis_of_all_rows() -> None:
    x, y = views()
    whole = reduce(RowStatistics.merge, parts_of(x, y)).diagnosis(labels=uc.Labels(model="x", data="words"), draws=50)
    at_once = uc.diagnose_rows(x.split(512), pairs=y.split(512), labels=uc.Labels(model="x", data="words"), draws=50)
    apart, together = whole.layers[0], at_once.layers[0]
    assert (whole.tokens, whole.data, whole.settings) == (at_once.tokens, at_once.data, at_once.settings)
    assert apart.measures.keys() == together.measures.keys()
    for name in EXACT:
        assert apart[name] == pytest.approx(together[name], rel=1e-12), name
    assert apart.spectrum == together.spectrum
    for name in apart.measures.keys() - EXACT:  # of a sample
        assert apart[name] == pytest.approx(together[name], rel=0.1), name
    assert apart.intervals["alignment"].rows == len(x)


def test_any_order_and_nesting_of_merges_gives_the_same_bits() -> None:
    a, b, c, d = parts_of(*views(1200), sizes=(500, 0, 300, 400))
    whole = (a + b) + (c + d)
    for order in permutations((a, b, c, d)):
        assert same(reduce(RowStatistics.merge, order), whole)
    assert same(d.merge(b.merge(c)).merge(a), whole)
    assert whole.diagnosis(draws=0).layers == ((c + a) + (d + b)).diagnosis(draws=0).layers
    assert (a.count, whole.count) == (500, 1200)  # parts are left alone


def test_measures_are_those_of_the_stacked_rows() -> None:
    x, y = views(1000)
    (layer,) = uc.diagnose_rows(x.split(300), pairs=y.split(300), draws=0).layers
    rows, other = x.double(), y.double()
    for name in ("mean_cosine", "effective_rank", "token_variance", "feature_variance", "feature_correlation"):
        assert layer[name] == pytest.approx(float(getattr(uc, name)(rows)), rel=1e-9), name
    assert layer["alignment"] == pytest.approx(float(uc.alignment(rows, other)), rel=1e-9)
    assert layer["uniformity"] == pytest.approx(float(uc.uniformity(x)), rel=1e-5)  # the sample is all rows


def test_how_the_stream_is_cut_makes_no_difference() -> None:
    x, _ = views(3000)
    one, many = (uc.diagnose_rows(x.split(size), draws=0) for size in (3000, 17))
    for name, found in one.layers[0].measures.items():
        assert many.layers[0][name] == pytest.approx(found.mean, rel=1e-9), name
    assert (one.verdict, one.sequences) == (many.verdict, 1)


def test_a_matrix_is_its_only_part() -> None:
    x, y = views(300)
    assert uc.diagnose_rows(x, pairs=y).layers == uc.diagnose_rows([x], pairs=[y]).layers
    with pytest.raises(ValueError, match=r"shape \(m, d\)"):
        uc.diagnose_rows(x[0])


@pytest.mark.parametrize("workers", [2, 5])
def test_threads_give_the_same_bits(workers: int) -> None:
    x, y = views(3000)
    x[1000:1900] *= 40  # whichever order parts are finished in, they are added in that of the stream
    one, many = (
        uc.diagnose_rows(x.split(170), pairs=y.split(170), draws=0, workers=count, labels=uc.Labels("x"))
        for count in (1, workers)
    )
    assert one.layers == many.layers


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    x, _ = views(900)
    x[500, 3] = math.nan
    with pytest.raises(NotFiniteError, match="NaN"):
        uc.diagnose_rows(x.split(100), workers=2)
    with pytest.raises(ValueError, match="workers"):
        uc.diagnose_rows(x.split(100), workers=0)


def test_rows_that_are_too_wide_for_moments_are_known_by_the_sample() -> None:
    x = torch.randn(600, 1600, generator=torch.Generator().manual_seed(0))
    a, b = RowStatistics(1600, seed=0), RowStatistics(1600, seed=1)
    a.update(x[:400])
    b.update(x[400:])
    layer, at_once = (a + b).diagnosis(draws=0).layers[0], uc.diagnose_rows([x], draws=0).layers[0]
    for name, found in at_once.measures.items():
        assert layer[name] == pytest.approx(found.mean, rel=1e-5, abs=1e-6), name
    assert "moments.count" not in a.state()
    assert same(RowStatistics.from_state(a.state()), a)


def test_very_wide_rows_take_time_and_memory_linear_in_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [layer_measures.sample_size(dim) for dim in (768, 2**14, 2**17, 10**6)] == [1024, 1024, 128, 64]
    shared = torch.randn(40, 1, generator=torch.Generator().manual_seed(1))
    wide = shared + torch.randn(40, 3000, generator=torch.Generator().manual_seed(0))
    of_all = uc.diagnose_rows([wide], draws=0).layers[0]["feature_correlation"]
    monkeypatch.setattr(layer_measures, "FEATURES", 256)
    of_some = uc.diagnose_rows([wide], draws=0).layers[0]["feature_correlation"]
    assert of_some != of_all
    assert of_some == pytest.approx(of_all, rel=0.05)
    found = uc.diagnose_rows([torch.randn(4, 10**6, generator=torch.Generator().manual_seed(0))], draws=0).layers[0]
    assert found["dataset_rank"] == pytest.approx(3, abs=0.01)
    assert found["feature_correlation"] > 0.1


@pytest.mark.parametrize("way", ["state", "file", "pickle"])
def test_what_is_sent_or_kept_can_be_continued(way: str, tmp_path: Path) -> None:
    x, y = views(900)
    one, other = parts_of(x, y, sizes=(600, 300), t=3.0, alpha=1.0)
    if way == "file":
        assert one.save(tmp_path / "new" / "one.safetensors") == tmp_path / "new" / "one.safetensors"
    again = {
        "state": lambda: RowStatistics.from_state(one.state()),
        "file": lambda: RowStatistics.load(tmp_path / "new" / "one.safetensors"),
        "pickle": lambda: pickle.loads(pickle.dumps(one)),
    }[way]()
    assert same(again, one)
    for statistics in (one, again):
        statistics.update(x[:7], y[:7])
    assert same(again, one)
    assert same(again.merge(other), other.merge(one))
    assert RowStatistics.from_state((one + other).state()).diagnosis(draws=40).layers[0]["alignment"] > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": -1}, "seed"),
        ({"t": torch.tensor(-1.0).double()}, "positive"),
        ({"alpha": 2}, "alpha"),
        ({"more": 1}, "more"),
        ({"moments.count": 500}, "same rows"),
        ({"distances.moments.count": 500}, "same numbers"),
        ({"sample.rows": torch.zeros(3, 12)}, "rows"),
        ({"moments.gram": torch.full((2, 12, 12), 1e301, dtype=torch.float64)}, "gram"),
        ({"moments.sum": torch.zeros(4, 12).double()}, "sum"),
        ({"moments.sum": torch.zeros(2, 2**22).double()}, "gram"),  # whose Gram matrix no machine has room for
        ({f"moments.{name}": torch.zeros(2, *shape).double() for name, shape in NARROW.items()}, "same rows"),
    ],
)
def test_a_wrong_state_is_refused(change: dict[str, Tensor | int], says: str, tmp_path: Path) -> None:
    (one,) = parts_of(*views(100), sizes=(100,))
    state = {**one.state(), **change}
    with pytest.raises(ValueError, match=says):
        RowStatistics.from_state(state)
    save_file({name: torch.as_tensor(value).contiguous() for name, value in state.items()}, tmp_path / "bad")
    with pytest.raises(ValueError, match="row statistics"):
        RowStatistics.load(tmp_path / "bad")


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no numbers", encoding="utf-8")
    with pytest.raises(ValueError, match="row statistics"):
        RowStatistics.load(tmp_path / "text")


def test_what_does_not_fit_together_is_not_merged() -> None:
    x, y = views(200)
    (one,) = parts_of(x, y, sizes=(200,))
    with pytest.raises(ValueError, match="same dim"):
        one.merge(RowStatistics(12, t=3.0, seed=1))
    with pytest.raises(ValueError, match="different seeds"):
        one.merge(parts_of(x, y, sizes=(200,))[0])
    without = RowStatistics(12, seed=1)
    assert same(one + without, without + one)  # it has no rows yet
    without.update(x)
    for merge in (lambda: one + without, lambda: without + one, lambda: one.update(x), lambda: without.update(x, y)):
        with pytest.raises(ValueError, match="all rows"):
            merge()
    with pytest.raises(TypeError):
        one + 1  # type: ignore[operator]


def test_rows_that_float32_would_turn_into_zeros_are_refused() -> None:
    """They are apart, but their sample in float32 would be one point: a complete collapse."""
    x = views(200)[0].double()
    assert uc.diagnose_rows([x * 1e-30]).verdict.kind == "none"
    with pytest.raises(ValueError, match="200 of 200"):
        uc.diagnose_rows([x * 1e-50])
    x[7] = 0.0
    with pytest.raises(ValueError, match="199 of 200"):
        uc.diagnose_rows([x * 1e-50])


@pytest.mark.parametrize("alpha", [2, 4])
def test_pairs_that_differ_by_rounding_alone_are_measured(alpha: float) -> None:
    """Float32 has no such small distance, but nothing depends on its digits."""
    x = views(200)[0].double()
    layer = uc.diagnose_rows([x], pairs=[x * 1.001], alpha=alpha, draws=100).layers[0]
    assert 0 < layer["alignment"] < 1e-15**alpha


def test_activations_whose_variance_float32_would_turn_into_zero_are_measured() -> None:
    x = torch.randn(8, 30, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, other = (uc.diagnose_activations([x * scale]).layers[0] for scale in (1.0, 1e-25))
    assert other["token_variance"] == pytest.approx(1e-50 * one["token_variance"])
    assert other["robust_cosine"] == pytest.approx(one["robust_cosine"])


def test_bad_rows_are_refused_and_nothing_is_added() -> None:
    x, y = views(50)
    (one,) = parts_of(x, y, sizes=(50,))
    before = one.state()
    bad = x.clone()
    bad[3, 2] = math.nan
    for rows, pairs, says in (
        (bad, y, "1 of"),
        (x, bad, "1 of"),
        (x, y[1:], r"\(50, 12\), got \(49, 12\)"),
        (x[:, :3], y[:, :3], r"got \(50, 3\)"),
        (x[None], y[None], r"shape \(m, d\)"),
        (x.double() * 1e39, y, "3.4e[+]38: [0-9]+ of 600"),
    ):
        with pytest.raises(ValueError, match=says):
            one.update(rows, pairs)
    assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(v)) for name, v in one.state().items())


def test_too_few_rows_and_bad_settings() -> None:
    one = RowStatistics(3)
    with pytest.raises(ValueError, match="no rows"):
        one.diagnosis()
    one.update(torch.randn(1, 3))
    with pytest.raises(ValueError, match="two"):
        one.diagnosis()
    for asked in ({"t": 0.0}, {"t": 1e7}, {"alpha": -1.0}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(asked)) if "alpha" not in asked else "exponent"):
            RowStatistics(3, **asked)
    with pytest.raises(ValueError, match="dim"):
        RowStatistics(0)


def test_half_precision_rows_are_not_rounded() -> None:
    x, y = (view.half() for view in views(300))
    half, full = RowStatistics(12), RowStatistics(12)
    half.update(x, y)
    full.update(x.double(), y.double())
    for name, found in full.diagnosis(draws=0).layers[0].measures.items():
        assert half.diagnosis(draws=0).layers[0][name] == pytest.approx(found.mean, rel=1e-12), name
