"""The plot on the start page: the advice of a collapsed network is run as it is printed, and the plot shows both."""

from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

from website.pages import start

from experiments import before_after


def test_the_advice_is_attached_to_the_second_network() -> None:
    found = before_after.run(before_after.Config(depth=12, epochs=2), seed=0)
    assert found["advice"].startswith("uc.attach(model, ")
    assert found["before"]["verdict"] != "none"
    assert found["after"]["effective_rank"][-1] > 2 * found["before"]["effective_rank"][-1]
    assert len(found["after"]["mean_cosine"]) == 11


def test_plot_and_sentence_of_the_start_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(start, "IMAGES", tmp_path)
    assert [path.name for path in start.draw()] == ["before_after.svg"]
    before, after = start.accuracies("before"), start.accuracies("after")
    assert max(before) < min(after)
    assert f"{start.spread(before)} → {start.spread(after)}" in start.numbers()
