"""Rows of a table against each other, seed by seed: which are compared, and what is said of them."""

import json
from dataclasses import replace

import pytest
from tests.lab.made_up import TABLE, runs

from uncollapse.lab.tables import markdown
from uncollapse.lab.tables.contrasts import compare_rows, contrast_note, contrast_rows
from uncollapse.lab.tables.paper_table import Contrast, build_cells
from uncollapse.lab.tables.significance import compare, holm

GAINS = (0.82, 0.84, 0.85, 0.83, 0.86)
RECORDS = [
    *runs(0.80, 0.81, 0.80, 0.82, 0.81, norm="pair", layers=8),
    *runs(*GAINS, norm="contra", layers=8),
    *runs(*GAINS, norm="contra", layers=16),
    *runs(0.80, 0.90, 0.80, norm="pair", layers=16),
    *runs(0.70, norm="none", layers=16),
]
PAIR = replace(TABLE, contrasts=(Contrast("pair", row="contra"), Contrast("none", row="contra", columns=(16,))))


def test_only_what_is_asked_for_where_both_have_seeds() -> None:
    found = compare_rows(PAIR, build_cells(PAIR, RECORDS))
    assert [(c.group, c.column, c.row, c.rival, c.paired.n) for c in found] == [
        ("cora", 8, "contra", "pair", 5),
        ("cora", 16, "contra", "pair", 3),
        ("cora", 16, "contra", "none", 1),
    ]
    limited = replace(PAIR, contrasts=(Contrast("pair", row="contra", columns=(8,)),))
    assert [c.column for c in compare_rows(limited, build_cells(limited, RECORDS))] == [8]
    every = replace(PAIR, contrasts=(Contrast("pair"),))
    assert {c.row for c in compare_rows(every, build_cells(every, RECORDS))} == {"contra", "none"}
    assert compare_rows(TABLE, build_cells(TABLE, RECORDS)) == []


def test_the_family_is_all_tests_of_the_table() -> None:
    first, second, single = compare_rows(PAIR, build_cells(PAIR, RECORDS))
    assert first.paired.p == 2 / 32  # the least there is with five seeds
    assert [first.holm, second.holm] == holm([first.paired.p, second.paired.p])
    assert first.holm == pytest.approx(2 * 2 / 32)
    assert single.holm is None  # one pair cannot be tested, and makes the family no larger


def test_words_have_the_interval() -> None:
    found = compare_rows(PAIR, build_cells(PAIR, RECORDS))
    head, rows = contrast_rows(PAIR, found)
    assert head == ("data", "layers", "comparison", "mean", "95 % interval", "seeds", "p", "Holm p")
    low, high = found[0].paired.interval
    interval = f"{low:+.2f} … {high:+.2f}"
    assert rows[0] == ("cora", "8", "contra − pair", "+3.20", interval, "5", "0.062", "0.12")
    assert rows[2][3:] == ("+12.00", "–", "1", "–", "–")
    assert "the 2 tests" in contrast_note(found)
    text = markdown.to_markdown(PAIR, RECORDS)
    assert f"| cora | 8 | contra − pair | +3.20 | {interval} | 5 | 0.062 | 0.12 |" in text
    assert "within noise" not in text


def test_json_has_every_number() -> None:
    stated = json.loads(json.dumps(markdown.table_json(PAIR, build_cells(PAIR, RECORDS)), allow_nan=False))
    first = stated["contrasts"][0]
    paired = compare({i: 100 * gain for i, gain in enumerate(GAINS)}, dict(enumerate((80.0, 81.0, 80.0, 82.0, 81.0))))
    assert (first["data"], first["layers"], first["row"], first["rival"]) == ("cora", 8, "contra", "pair")
    assert first["mean"] == pytest.approx(paired.mean)
    assert first["interval"] == pytest.approx(paired.interval)
    assert (first["n"], first["p"], first["holm"]) == (5, paired.p, 0.125)
    assert first["seeds"] == pytest.approx({str(seed): value for seed, value in paired.differences.items()})
    assert stated["contrasts"][2]["interval"] is None


def test_cells_of_other_settings_are_not_compared() -> None:
    """Networks with other widths are no baseline, however many seeds both have."""
    fixed = replace(PAIR, protocol={"widths": (32,), "clip": None}, free=("clip",))
    others = [
        *runs(0.80, 0.81, norm="pair", layers=8, widths=(8,)),
        *runs(0.82, 0.84, norm="contra", layers=8),
        *runs(0.82, 0.84, norm="contra", layers=16, clip=1.0),
        *runs(0.80, 0.81, norm="pair", layers=16),
    ]
    found = compare_rows(fixed, build_cells(fixed, others))
    assert [(c.column, c.row, c.rival) for c in found] == [(16, "contra", "pair")]  # clip is free
    (note,) = [note for note in markdown.cell_notes(fixed, build_cells(fixed, others)) if "compared" in note]
    assert note == "cora, contra, layers 8: not compared by seed with rows of other settings."
    alike = [*others, *runs(0.82, 0.84, norm="contra", layers=8, widths=(8,))][4:]
    alike += others[:2]
    assert len(compare_rows(fixed, build_cells(fixed, alike))) == 2
    free = replace(PAIR, protocol={})
    assert len(compare_rows(free, build_cells(free, others))) == 2  # without a protocol rows may be such settings
