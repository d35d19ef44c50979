import dataclasses
import math

import pytest

from uncollapse.diagnosis.result import Summary
from uncollapse.metrics.bootstrap import Interval
from uncollapse.report import difference
from uncollapse.report.words import describe_path, format_number, join_words, title_in_sentence


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
    assert format_number(value) == text


def test_lists_and_titles_inside_a_sentence() -> None:
    assert [join_words(["a"]), join_words(["a", "b"]), join_words(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert (title_in_sentence("effective_rank"), title_in_sentence("mean_average_distance")) == (
        "effective rank",
        "mean average distance",
    )


def test_path_names_the_first_and_the_last_value(make) -> None:
    assert describe_path(make().layers, "mean_cosine") == "0.100 at embed → 0.900 at block 3"
    assert describe_path(make().layers[:1], "mean_cosine") == "0.100 at embed"
    assert describe_path(make().layers, "alignment") == "not measured"


def test_difference_says_what_changed_and_where_it_changed_most(make) -> None:
    found = difference(make("before", 0.9), make("after", 0.5))
    assert found[0] == "The verdict is no collapse instead of complete collapse from block 3 on."
    assert "At block 3 (last layer) the mean cosine is 0.500 instead of 0.900 (−0.400)." in found
    assert "At block 3 (last layer) the effective rank is 21.0 instead of 5.00 (4.2×)." in found


def test_a_change_in_the_middle_is_told_beside_the_last_layer(make) -> None:
    a = make()
    peak = dataclasses.replace(a.layers[2], measures=a.layers[2].measures | a.layers[4].measures)
    b = dataclasses.replace(a, layers=(*a.layers[:2], peak, *a.layers[3:4], make("", 0.8).layers[4]))
    told = [text for text in difference(a, b) if "mean cosine" in text]
    assert told[0].startswith("At block 1 the mean cosine is 0.900 instead of 0.500")
    assert told[1].startswith("At block 3 (last layer) the mean cosine is 0.800 instead of 0.900")


def test_equal_diagnoses_are_called_the_same(make) -> None:
    found = difference(make(), make())
    assert found[0] == "The verdict stays the same: complete collapse from block 3 on."
    assert "The effective rank is the same at every layer, or nearly." in found


def test_other_data_and_other_depth_are_said(make) -> None:
    found = difference(make(blocks=2, data="poems"), make(blocks=4, data=""))
    assert "They were measured on different data: poems; not named." in found
    assert "The models have different layers, 3 and 5 of them, compared at the same relative depth." in found


def test_embeddings_of_two_models_are_in_two_files(make) -> None:
    one, other = (dataclasses.replace(make(data=f"{name}.npy: 9 rows"), family="embeddings") for name in "ab")
    said = "They were read from a.npy: 9 rows; b.npy: 9 rows. Compare them only if both have the same inputs"
    assert any(sentence.startswith(said) for sentence in difference(one, other))


def test_another_amount_of_data_is_said(make) -> None:
    few = dataclasses.replace(make(), tokens=100)
    many = dataclasses.replace(make(), tokens=4000)
    assert "They were measured on 100 and 4,000 tokens: ranks depend on how many there are." in difference(few, many)
    assert not any("depend on how many" in sentence for sentence in difference(few, few))


def test_nothing_in_common_is_said(make) -> None:
    bare = tuple(dataclasses.replace(layer, measures={}) for layer in make().layers)
    assert difference(make(), make(layers=bare))[-1].startswith("No measure was taken in both")


def test_intervals_say_whether_two_values_can_be_told_apart(make) -> None:
    def with_interval(d, low: float, high: float):
        (layer,) = d.layers
        found = {"uniformity": Interval(layer["uniformity"], low, high, 0.95, 100, 500)}
        return dataclasses.replace(d, layers=(dataclasses.replace(layer, intervals=found),))

    one, other = make("a", 0.2, names=["rows"], baseline=False), make("b", 0.6, names=["rows"], baseline=False)
    one = dataclasses.replace(one, layers=(dataclasses.replace(one.layers[0], measures={"uniformity": Summary(-3.0)}),))
    other = dataclasses.replace(
        other, layers=(dataclasses.replace(other.layers[0], measures={"uniformity": Summary(-2.0)}),)
    )
    apart = difference(with_interval(one, -3.1, -2.9), with_interval(other, -2.1, -1.9))
    assert "the uniformity is −2.00 instead of −3.00 (+1.00). Their intervals do not overlap." in apart[-1]
    close = difference(with_interval(one, -3.1, -2.05), with_interval(other, -2.1, -1.9))
    assert close[-1].endswith("Their intervals overlap.")
    assert "intervals" not in " ".join(difference(one, other))


def test_values_of_different_settings_are_not_compared(make) -> None:
    one, other = make("a", 0.2), make("b", 0.6, settings={"t": 3.0})
    told = difference(one, other)
    assert "The uniformity is not compared: it was taken with t = 2 and t = 3." in told
    assert not any("the uniformity is" in sentence for sentence in told)
    assert not any("not compared" in sentence for sentence in difference(one, make("c", 0.6, settings={"t": 2.0})))


def test_rows_of_two_models_have_no_depth_to_speak_of(make) -> None:
    told = difference(make("a", names=["a"], baseline=False), make("b", names=["b"], baseline=False))
    assert not any("different layers" in sentence for sentence in told)
