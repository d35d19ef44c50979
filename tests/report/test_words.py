import dataclasses
import math

import pytest

from uncollapse.report import difference
from uncollapse.report.words import inside, listed, number, path_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.87321, "0.873"),
        (27.31, "27.3"),
        (2.266, "2.27"),
        (384.4, "384"),
        (1234567.0, "1,234,567"),
        (3.2e-5, "3.2e−5"),
        (-0.5, "−0.500"),
        (0.0, "0.000"),
        (4.5e9, "4.5e9"),
        (math.nan, "–"),
        (None, "–"),
        (math.inf, "∞"),
    ],
)
def test_numbers_have_about_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_lists_and_titles_inside_a_sentence() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert (inside("effective_rank"), inside("mean_average_distance")) == ("effective rank", "MAD")


def test_path_names_the_first_and_the_last_value(make) -> None:
    assert path_of(make().layers, "mean_cosine") == "0.100 at embed → 0.900 at block 3"
    assert path_of(make().layers[:1], "mean_cosine") == "0.100 at embed"
    assert path_of(make().layers, "alignment") == "not measured"


def test_difference_says_what_changed_and_where_it_changed_most(make) -> None:
    found = difference(make("before", 0.9), make("after", 0.5))
    assert found[0] == "The verdict is no collapse instead of complete collapse from block 3 on."
    assert "At block 3 (last layer) the token similarity is 0.500 instead of 0.900 (−0.400)." in found
    assert "At block 3 (last layer) the effective rank is 21.0 instead of 5.00 (4.2×)." in found


def test_a_change_in_the_middle_is_told_beside_the_last_layer(make) -> None:
    a = make()
    peak = dataclasses.replace(a.layers[2], measures=a.layers[2].measures | a.layers[4].measures)
    b = dataclasses.replace(a, layers=(*a.layers[:2], peak, *a.layers[3:4], make("", 0.8).layers[4]))
    told = [text for text in difference(a, b) if "token similarity" in text]
    assert told[0].startswith("At block 1 the token similarity is 0.900 instead of 0.500")
    assert told[1].startswith("At block 3 (last layer) the token similarity is 0.800 instead of 0.900")


def test_equal_diagnoses_are_called_the_same(make) -> None:
    found = difference(make(), make())
    assert found[0] == "The verdict stays the same: complete collapse from block 3 on."
    assert "The effective rank is the same at every layer, or nearly." in found


def test_other_data_and_other_depth_are_said(make) -> None:
    found = difference(make(blocks=2, data="poems"), make(blocks=4, data=""))
    assert "They were measured on different data: poems; not named." in found
    assert "The models have different layers, 3 and 5 of them, compared at the same relative depth." in found


def test_nothing_in_common_is_said(make) -> None:
    bare = tuple(dataclasses.replace(layer, measures={}) for layer in make().layers)
    assert difference(make(), make(layers=bare))[-1].startswith("No measure was taken in both")
