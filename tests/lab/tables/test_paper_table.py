"""Which results count in which cell, and what the cell then says."""

import json
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import t as student
from tests.lab.made_up import PAPER, TABLE, published, result, runs

from uncollapse.errors import UsageError
from uncollapse.lab.tables import markdown
from uncollapse.lab.tables.paper_table import Contrast, PaperTable, Published, TableCell, build_cells


def cell(made: list[TableCell], norm: str = "contra", layers: int = 16, data: str = "cora") -> TableCell:
    (found,) = [c for c in made if (c.group, c.row, c.column) == (data, norm, layers)]
    return found


def test_mean_and_deviation_over_seeds_beside_the_paper() -> None:
    found = cell(build_cells(TABLE, runs(0.80, 0.81, 0.79, norm="contra", layers=16)))
    assert found.figures == pytest.approx({0: 80.0, 1: 81.0, 2: 79.0})
    assert found.mean == pytest.approx(80.0)
    assert found.std == pytest.approx(1.0)  # with n − 1
    assert found.difference == pytest.approx(0.25)
    assert found.reached is True
    below = cell(build_cells(TABLE, runs(0.79, norm="contra", layers=16)))
    assert (below.reached, below.std, below.chosen) == (False, None, {})


def test_all_places_of_the_paper_and_of_the_results() -> None:
    made = build_cells(TABLE, runs(0.8, norm="pair", layers=4) + runs(0.7, norm="pair", layers=4, data="pubmed"))
    places = [(c.group, c.row, c.column) for c in made]
    cora = [("cora", norm, layers) for norm in ("none", "contra", "pair") for layers in (2, 4, 16)]
    assert places == [*cora, ("pubmed", "pair", 4)]  # the paper's rows first and in its order, columns by size
    empty = cell(made, "none", 2)
    assert not empty.run
    assert (empty.mean, empty.reached, empty.published) == (None, None, TABLE.published[0])
    assert cell(made, "pair", 4).reached is None


def test_results_elsewhere_do_not_belong() -> None:
    made = build_cells(TABLE, runs(0.9, norm="contra", layers=16, epochs=5))
    assert not any(c.run for c in made)


def scales(validation: dict[float, float | None], test: dict[float, float], seed: int = 0) -> list[dict[str, Any]]:
    return [
        result(test[scale], validation=score, norm="contra", layers=16, scale=scale, seed=seed)
        for scale, score in validation.items()
    ]


def test_the_value_is_chosen_by_validation_with_the_first_seed_and_never_by_test() -> None:
    records = scales({0.2: 0.70, 0.5: 0.72, 1.0: 0.71}, {0.2: 0.99, 0.5: 0.80, 1.0: 0.98})
    records += scales({0.2: 0.99, 0.5: 0.10}, {0.2: 0.97, 0.5: 0.82}, seed=1)
    for _ in range(5):
        random.Random(0).shuffle(records)
        found = cell(build_cells(TABLE, records))
        assert found.chosen == {"scale": 0.5}
        assert found.figures == pytest.approx({0: 80.0, 1: 82.0})


def test_of_equals_the_smaller_value() -> None:
    found = cell(build_cells(TABLE, scales({1.0: 0.7, 0.2: 0.7, 0.5: 0.7}, dict.fromkeys((0.2, 0.5, 1.0), 0.8))))
    assert found.chosen == {"scale": 0.2}


def test_the_lowest_seed_that_all_values_share_chooses() -> None:
    best_with_one = scales({0.2: 0.9, 0.5: 0.1}, {0.2: 0.8, 0.5: 0.8}, seed=1)
    records = (
        scales({0.5: 0.95}, {0.5: 0.8}, seed=0) + best_with_one + scales({0.2: 0.1, 0.5: 0.9}, {0.2: 1, 0.5: 1}, 2)
    )
    assert cell(build_cells(TABLE, records)).chosen == {"scale": 0.2}


def test_the_seed_with_most_values_chooses_where_none_has_all() -> None:
    records = scales({1.0: 0.99}, {1.0: 0.5}, seed=0) + scales({0.2: 0.7, 0.5: 0.8}, {0.2: 0.6, 0.5: 0.7}, seed=1)
    assert cell(build_cells(TABLE, records)).chosen == {"scale": 0.5}


def test_what_did_not_stay_finite_is_never_chosen_before_what_did() -> None:
    records = scales({0.2: None, 0.5: 0.1}, {0.2: 0.9, 0.5: 0.3})
    assert cell(build_cells(TABLE, records)).chosen == {"scale": 0.5}


def test_runs_that_did_not_stay_finite_are_told() -> None:
    some = cell(build_cells(TABLE, runs(0.9, None, float("nan"), norm="contra", layers=16)))
    assert (some.failed, some.reached) == ((1, 2), False)
    assert markdown.format_result(TABLE, some) == "90.00 (1, 2 not finite)"
    every = cell(build_cells(TABLE, runs(None, norm="contra", layers=16)))
    assert (every.run, every.mean, every.reached) == (True, None, False)
    assert markdown.format_result(TABLE, every) == "1 not finite"


def test_results_with_other_settings_are_not_mixed_into_a_mean() -> None:
    usual = runs(0.8, norm="none", layers=2) + runs(0.6, norm="none", layers=16) + runs(0.7, norm="contra", layers=2)
    both = runs(0.80, 0.81, norm="contra", layers=16) + runs(0.1, 0.1, 0.1, norm="contra", layers=16, widths=(8, 8))
    found = cell(build_cells(TABLE, usual + both))
    assert found.figures == pytest.approx({0: 80.0, 1: 81.0})
    assert (found.unusual, found.left_out) == ({}, 3)
    alone = cell(build_cells(TABLE, usual + both[2:]))
    assert (alone.unusual, alone.left_out, alone.mean) == ({"widths": (8, 8)}, 0, pytest.approx(10.0))
    assert markdown.cell_notes(TABLE, build_cells(TABLE, usual + both[2:])) == [
        "cora, contra, layers 16: with widths (8, 8)."
    ]
    assert markdown.cell_notes(TABLE, build_cells(TABLE, usual + both)) == [
        "cora, contra, layers 16: 3 results with other settings (--set shows them) do not count."
    ]


def test_a_board_that_would_choose_by_what_it_shows() -> None:
    with pytest.raises(ValueError, match="shows 'test'"):
        replace(TABLE, by="test")


def test_a_published_number_without_a_place() -> None:
    with pytest.raises(ValueError, match="lacks layers"):
        replace(TABLE, published=(Published({"data": "cora", "norm": "none"}, 80.0),))


def test_a_claim_about_a_row_that_the_paper_does_not_have() -> None:
    with pytest.raises(ValueError, match="claim"):
        replace(TABLE, claim="pair")


def test_a_field_that_results_do_not_have() -> None:
    with pytest.raises(UsageError, match=r"'depth'.*data, norm"):
        build_cells(PaperTable("Depth", {}, "data", "norm", "depth"), runs(0.8))


MADE = runs(0.80, 0.81, norm="contra", layers=16) + runs(0.5, norm="contra", layers=16, scale=0.5, validation=0.1)
MADE += runs(0.8, norm="none", layers=2)


def test_words() -> None:
    made = build_cells(TABLE, MADE)
    found = cell(made)
    spread = statistics.stdev((80, 81))
    assert markdown.format_marked(TABLE, found) == f"✓ 80.50 ± {spread:.2f} (2)"
    assert (markdown.format_published(TABLE, found), markdown.format_choice(found)) == ("79.75 ± 0.33", "scale 1.0")
    assert markdown.format_result(TABLE, cell(made, "none", 16)) == "–"
    assert markdown.coverage(TABLE, made) == "2 of 3 cells run. 1 of 2 above the paper's."
    assert markdown.legend(TABLE, made) == (
        "Test in percent: mean ± standard deviation (number of seeds). Below it the published number (Table 3). "
        "✓: above it. scale: chosen by validation, with the seeds that all values were run with."
    )


def test_a_board_without_a_paper_and_without_percent() -> None:
    table = PaperTable("Speed", {}, "data", "norm", "layers", metric="speed", percent=False)
    made = build_cells(table, [run | {"figures": {"speed": 1234.5}} for run in runs(0.1)])
    assert markdown.legend(table, made) == "Speed: mean ± standard deviation (number of seeds)."
    assert markdown.format_result(table, made[0]) == "1234 (1)"
    assert markdown.coverage(table, made) == "1 cell run."


def test_markdown() -> None:
    assert markdown.to_markdown(TABLE, MADE, level=3).splitlines() == [
        "### Depth",
        "",
        "#### cora",
        "",
        "| norm \\\\ layers | 2 | 16 |",
        "| --- | ---: | ---: |",
        "| none | 80.00 (1)<br>paper 81.75 ± 0.51 | –<br>paper 23.88 ± 3.06 |",
        "| contra | – | **80.50 ± 0.71 (2)**<br>paper 79.75 ± 0.33<br>scale 1.0 |",
        "",
        "Test in percent: mean ± standard deviation (number of seeds). Below it the published number (Table 3). "
        "Bold: above it. scale: chosen by validation, with the seeds that all values were run with.",
        "",
        "2 of 3 cells run. 1 of 2 above the paper's.",
    ]


def test_names_stay_names_in_markdown() -> None:
    text = markdown.to_markdown(TABLE, runs(0.8, norm="a|b<br>_c_"))
    assert "| a\\|b\\<br>\\_c\\_ |" in text


def test_facts_are_json() -> None:
    stated = json.loads(json.dumps(markdown.table_json(TABLE, build_cells(TABLE, MADE)), allow_nan=False))
    assert len(stated["cells"]) == 4
    found = stated["cells"][-1]
    assert {"data": "cora", "norm": "contra", "layers": 16, "reached": True, "chosen": {"scale": 1.0}}.items() <= (
        found.items()
    )
    assert found["seeds"] == pytest.approx({"0": 80.0, "1": 81.0})
    assert found["published"] == {"mean": 79.75, "std": 0.33, "runs": None, "source": "Table 3"}
    assert (found["tied"], found["interval"], stated["contrasts"]) == (False, None, [])


def test_order_of_numbers_and_of_names() -> None:
    paper = (published("pair", 32, 1.0), published("none", 4, 1.0))
    made = build_cells(replace(TABLE, published=paper), runs(0.5, norm="layer", layers=8))
    assert list(dict.fromkeys(c.row for c in made)) == ["pair", "none", "layer"]
    assert list(dict.fromkeys(c.column for c in made)) == [4, 8, 32]


def test_settings_of_the_protocol_are_not_those_that_happen_to_be_there() -> None:
    """A lone run of three epochs is not the protocol, and is not judged by the paper's number."""
    table = replace(TABLE, where={}, protocol={"epochs": 200, "clip": None}, free=("clip",))
    (alone,) = [cell for cell in build_cells(table, runs(0.9, epochs=3)) if cell.run]
    assert (alone.unusual, alone.reached) == ({"epochs": 3}, None)
    (cell,) = [cell for cell in build_cells(table, [*runs(0.9, 0.9, 0.9, epochs=3), *runs(0.8)]) if cell.run]
    assert (cell.unusual, cell.mean, cell.left_out, cell.reached) == ({}, pytest.approx(80.0), 3, False)
    (free,) = [cell for cell in build_cells(table, runs(0.9, clip=1.0)) if cell.run]
    assert (free.unusual, free.reached) == ({"clip": 1.0}, True)


FIVE = replace(TABLE, published=tuple(replace(number, runs=5) for number in PAPER))


def beside_81_75(*tests: float) -> TableCell:
    (found,) = [cell for cell in build_cells(FIVE, runs(*tests)) if cell.run]  # beside 81.75 ± 0.51 of 5 runs
    return found


def test_near_is_an_interval_within_two_points() -> None:
    close = beside_81_75(0.812, 0.814, 0.816, 0.818, 0.814)
    half = student.ppf(0.975, 4) * (statistics.variance(close.figures.values()) / 5 + 0.51**2 / 5) ** 0.5
    assert close.interval == pytest.approx((81.48 - 81.75 - half, 81.48 - 81.75 + half))
    assert close.near
    assert markdown.format_marked(FIVE, close).startswith("≈ 81.48")
    assert markdown.format_difference(FIVE, close) == "−0.96 … +0.42"
    assert not beside_81_75(0.80, 0.80, 0.80, 0.80, 0.80).near  # 1.75 ± 0.63 below
    assert not beside_81_75(0.82, 0.82, 0.82, 0.82, 0.83).near  # above: reached
    assert not beside_81_75(0.814).near  # one seed says nothing of its noise
    unknown = replace(TABLE, published=PAPER)  # nor does a paper without its number of runs
    assert not any(cell.near or cell.interval for cell in build_cells(unknown, runs(0.814, 0.815)))


def test_a_noisier_run_is_never_nearer() -> None:
    """The same mean with growing deviation: what is not near stays so. It was the larger deviation that decided."""
    noises = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
    found = [beside_81_75(*(0.813 + noise * step for step in (-2, -1, 0, 1, 2))) for noise in noises]
    near, widths = [cell.near for cell in found], [cell.interval[1] - cell.interval[0] for cell in found]
    assert near == sorted(near, reverse=True)
    assert (near[0], near[-1]) == (True, False)
    assert widths == sorted(widths)


def test_ties_are_counted_apart_and_only_the_claim_counts() -> None:
    collapsed = runs(0.2388, 0.2388, norm="none", layers=16)
    made = build_cells(TABLE, [*collapsed, *runs(0.9, norm="none", layers=2), *runs(0.7, norm="contra", layers=16)])
    tie = cell(made, "none", 16)
    assert (tie.reached, tie.tied, cell(made, "none", 2).tied) == (True, True, False)
    assert markdown.format_marked(TABLE, tie) == "= 23.88 ± 0.00 (2)"
    assert markdown.coverage(TABLE, made) == "3 of 3 cells run. 1 of 3 above the paper's, 1 equal to it."
    claimed = replace(TABLE, claim="contra")
    assert markdown.coverage(claimed, made) == "3 of 3 cells run. contra: 0 of 1 above the paper's."
    assert "**23.88" not in markdown.to_markdown(TABLE, collapsed)
    assert "=: equal as printed." in markdown.legend(TABLE, made)


def test_a_value_that_is_not_the_usual_one_is_told_even_without_a_choice() -> None:
    table = replace(TABLE, protocol={"scale": 1.0})
    (usual,), (other,) = ([c for c in build_cells(table, runs(0.8, scale=s)) if c.run] for s in (1.0, 0.2))
    assert (usual.chosen, other.chosen) == ({}, {"scale": 0.2})


def test_a_cell_that_lacks_values_which_others_chose_among_is_not_compared() -> None:
    others = [r for scale in (0.2, 0.5, 1.0) for r in runs(0.7 + scale / 10, norm="contra", layers=2, scale=scale)]
    made = build_cells(TABLE, [*others, *scales({0.2: 0.7, 0.5: 0.72}, {0.2: 0.99, 0.5: 0.99})])
    assert [(c.untried, c.reached) for c in made if c.row == "contra" and c.run] == [(0, None), (1, None)]
    assert any("1 of the values" in note for note in markdown.cell_notes(TABLE, made))
    complete = build_cells(TABLE, [*others, *scales(dict.fromkeys((0.2, 0.5, 1.0), 0.7), {0.2: 0.99, 0.5: 1, 1.0: 1})])
    assert (cell(complete).untried, cell(complete).reached) == (0, True)


def test_groups_without_results_are_left_out() -> None:
    table = replace(TABLE, published=(*PAPER, published("none", 2, 60.0, data="citeseer")))
    assert {cell.group for cell in build_cells(table, runs(0.8))} == {"cora"}
    assert {cell.group for cell in build_cells(table, [])} == {"cora", "citeseer"}


def test_rows_of_several_fields() -> None:
    table = replace(TABLE, rows="norm+scale", choose=(), published=(), contrasts=(Contrast("none"),))
    records = [*runs(0.8, 0.7, norm="none", scale=0.0), *runs(0.9, 0.9, norm="contra", scale=0.5)]
    assert {cell.row for cell in build_cells(table, records)} == {"none", "contra, scale 0.5"}


def in_words(config: Mapping[str, Any]) -> str:
    """A row that no field has by itself."""
    return "plain" if config["norm"] == "none" else f"{config['norm']} at {config['scale']}"


WORDED = replace(
    TABLE,
    rows="norm+scale",
    row_of=in_words,
    choose=(),
    published=(Published({"data": "cora", "norm+scale": "contra at 0.5", "layers": 2}, 70.0),),
    contrasts=(Contrast("plain"),),
)


def test_rows_in_words() -> None:
    """Where a row is made of the config, its fields do not make settings of their own."""
    records = [*runs(0.8, 0.7, scale=0.1), result(0.9, scale=0.2, seed=2), result(0.6, norm="contra", scale=0.5)]
    made = {cell.row: cell for cell in build_cells(WORDED, records)}
    assert list(made) == ["plain", "contra at 0.5"]  # what others are compared with comes first
    assert (made["contra at 0.5"].difference, made["contra at 0.5"].reached) == (pytest.approx(-10.0), False)
    assert made["plain"].figures == pytest.approx({0: 80.0, 1: 70.0, 2: 90.0})
    assert (made["plain"].unusual, made["plain"].left_out) == ({}, 0)
    assert markdown.corner_label(WORDED) == "norm \\ layers"


def test_the_whole_paper_beside_few_results() -> None:
    paper = (*PAPER, published("none", 2, 60.0, data="citeseer"))
    table = replace(TABLE, published=paper, all_groups=True)
    made = build_cells(table, runs(0.8, data="pubmed"))
    assert list(dict.fromkeys(cell.group for cell in made)) == ["pubmed", "cora", "citeseer"]  # ours first
    assert [cell.group for cell in made if cell.run] == ["pubmed"]
    assert build_cells(replace(table, all_groups=False), []) == build_cells(table, [])


def test_a_table_may_leave_out_what_the_paper_does_not_have() -> None:
    records = [*runs(0.8), *runs(0.7, data="pubmed")]
    groups = [{c.group for c in build_cells(replace(TABLE, other_groups=others), records)} for others in (True, False)]
    assert groups == [{"cora", "pubmed"}, {"cora"}]


def test_the_protocol_is_asked_for_only_where_the_paper_has_been() -> None:
    table = replace(TABLE, where={}, protocol={"epochs": 200})
    made = build_cells(table, [*runs(0.8, epochs=3), *runs(0.8, epochs=3, data="pubmed")])
    found = {cell.group: (cell.unusual, cell.comparable) for cell in made if cell.run}
    assert found == {"cora": ({"epochs": 3}, False), "pubmed": ({}, True)}
    alone = build_cells(
        replace(table, published=()), runs(0.8, epochs=3, data="pubmed")
    )  # a protocol without any paper
    assert [cell.unusual for cell in alone] == [{"epochs": 3}]
