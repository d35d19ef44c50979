from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from uncollapse.report import plot_data, words
from uncollapse.report import tracks as tr


class Counted(tuple[Any, ...]):
    """A tuple that counts how often it is walked through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("fewer", [0, 1])
def test_twenty_thousand_layers_take_time_linear_in_their_number(make, monkeypatch, fewer: int) -> None:
    monkeypatch.setattr(Counted, "walks", 0)
    small = make()
    deep = [
        replace(
            small,
            model=name,
            layers=Counted(replace(small.layers[1], name=f"block {i}", spectrum=(), heatmap=()) for i in range(count)),
            baseline=Counted(replace(small.layers[1], name=f"block {i}") for i in range(count)),
        )
        for name, count in (("a", 20_000), ("b", 20_000 - fewer))
    ]
    tracks = tr.build_tracks(deep)
    assert len(plot_data.axis_data(deep, tracks)["labels"]) == 20_000
    assert "the same" in words.difference(*deep)[-1]
    pairs = [(int(a.name[6:]), int(b.name[6:])) for a, b in tr.match_layers(*deep)]
    assert all(a in (b, b + 1) for a, b in pairs)
    assert pairs[-1] == (19_999, 19_999 - fewer)
    plot_data.caption("mean_cosine", deep)
    assert Counted.walks < 2000


def test_equal_names_are_numbered(make) -> None:
    assert tr.diagnosis_names([make("a"), make("b"), make("a")]) == ["a (1)", "b", "a (2)"]


def test_layers_stand_at_their_name_also_where_one_model_has_a_final_layer(make) -> None:
    plain, with_final = make(), make(names=["block 0", "block 1", "block 2", "block 3", "final"])
    assert tr.layer_axis([plain, with_final]) == ["embed", "block 0", "block 1", "block 2", "block 3", "final"]
    main = [track for track in tr.build_tracks([plain, with_final]) if not track.baseline]
    assert [track.x for track in main] == [(0, 1, 2, 3, 4), (1, 2, 3, 4, 5)]
    assert [(a.name, b.name) for a, b in tr.match_layers(plain, with_final)] == [(f"block {i}",) * 2 for i in range(4)]


def test_other_depths_are_matched_by_relative_depth(make) -> None:
    small, large = make(blocks=2), make(blocks=4)
    pairs = [(a.name, b.name) for a, b in tr.match_layers(small, large)]
    assert pairs[0] == ("embed", "embed")
    assert pairs[2] == ("block 0", "block 1")
    assert pairs[-1] == ("block 1", "block 3")
    assert tr.layer_axis([small, large])[-1] == "block 3"


def test_places_stand_where_their_block_stands_and_the_main_one_is_on_top(make) -> None:
    found = tr.build_tracks([make(places=("attention.residual",))])
    assert [(t.place, t.baseline) for t in found] == [("block", True), ("attention.residual", False), ("block", False)]
    assert found[1].x == found[2].x[1:]
    assert found[2].dash == ()
    assert len({track.dash for track in found}) == 3


def test_the_same_baseline_is_drawn_once(make) -> None:
    assert sum(track.baseline for track in tr.build_tracks([make("a"), make("b")])) == 1
    assert sum(track.baseline for track in tr.build_tracks([make("a"), make("b", 0.5)])) == 2


def test_ticks_are_short() -> None:
    long = "backbone.encoder.layers.3.output"
    assert [tr.tick_label(name, 4) for name in ("block 12", "embed", long)] == ["12", "embed", "#4"]
