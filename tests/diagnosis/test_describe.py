"""What is told about alignment and uniformity."""

from dataclasses import replace

import pytest
import torch

import uncollapse as uc
from uncollapse.diagnosis import describe
from uncollapse.diagnosis.layer_measures import SAMPLE
from uncollapse.diagnosis.result import Layer, Summary
from uncollapse.metrics.bootstrap import Interval


def layer(tokens: int = 5000, dim: int = 128, **values: float) -> Layer:
    known = {"mean_cosine": 0.07, "uniformity": -3.41, "uniformity_gap": 13.39, "alignment": 0.312}
    measures = {name: Summary(value) for name, value in (known | values).items()}
    ends = {"uniformity": (-3.412, -3.447, -3.371), "alignment": (0.312, 0.3041, 0.3202)}
    return Layer("x", "block", "", dim, tokens, measures, intervals={
        name: Interval(*three, level=0.95, draws=1000, rows=tokens) for name, three in ends.items()
    })  # fmt: skip


def test_both_numbers_in_plain_words() -> None:
    assert list(describe.describe_embeddings(layer(), 2, 2)) == [
        "Alignment 0.312 (95 %: 0.304 to 0.320) over 5,000 pairs: their mean squared distance, compared with "
        "1.860 for two random rows.",
        "Uniformity −3.41 (95 %: −3.45 to −3.37), 13 % from the optimum −3.938 of 128 dimensions, over 1,024 of 5,000 "
        "rows.",
    ]


def test_without_pairs_it_is_said_how_to_make_them() -> None:
    full = layer()
    bare = replace(full, measures={k: v for k, v in full.measures.items() if k != "alignment"})
    first = next(describe.describe_embeddings(bare, 2, 2))
    assert first == describe.NO_PAIRS
    assert all(words in first for words in ("--pairs FILE", "pairs=", "paraphrases", "augmentations", "queries"))


def test_other_settings_and_no_intervals() -> None:
    plain = replace(layer(SAMPLE, 1, uniformity_gap=4.25), intervals={})
    assert list(describe.describe_embeddings(plain, 3, 1)) == [
        "Alignment 0.312 over 1,024 pairs, distances to the power of 1.",
        "Uniformity −3.410, 4.2 % from the optimum −0.693 of 1 dimension, over 1,024 rows, with t = 3.",
    ]


@pytest.mark.parametrize(
    ("gap", "says"), [(-0.01, ", 0.0 % from the"), (-0.4, ", 0.4 % below the"), (0.2, "0.2 % from")]
)
def test_samples_below_the_optimum(gap: float, says: str) -> None:
    told = list(describe.describe_embeddings(layer(uniformity_gap=gap), 2, 2))[1]
    assert says in told
    assert ("by chance" in told) == (gap == -0.4)


def test_digits_follow_the_interval() -> None:
    made = Interval(0.0917, 0.09132, 0.09219, 0.9, 10, 5)
    assert describe.format_interval(made) == "90 %: 0.0913 to 0.0922"
    assert describe.format_interval(replace(made, low=-0.0000001, high=0.0)) == "90 %: 0.000000 to 0.000000"
    assert describe.format_interval(replace(made, low=0.0, high=0.0)) == "90 %: 0.000 to 0.000"


def test_the_random_distance_is_that_of_all_pairs() -> None:
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    told = uc.diagnose_rows([x], pairs=[x]).verdict.cautions[0]
    unit = torch.nn.functional.normalize(x, dim=-1)
    apart = torch.cdist(unit, unit).square().sum() / (300 * 299)
    assert f"compared with {apart:.3f} for two random rows" in told
