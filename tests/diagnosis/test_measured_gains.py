"""Advice by what was measured: the nearest depth, the best lower bound, and words where nothing helped or was run."""

from dataclasses import replace

import pytest

from uncollapse.diagnosis import advice
from uncollapse.diagnosis.reference_data import Gain, Measured, find_measured
from uncollapse.diagnosis.result import Cause
from uncollapse.diagnosis.verdict import Subject

SHALLOWER = Gain("shallower", "", "model", "# build it with 4 blocks", 40.0, 38.0, 42.0, 6)
LAYER_NORM = Gain("layer_norm", "", "model", "# add a LayerNorm", 30.0, 25.0, 35.0, 6)
RESIDUAL = Gain(
    *["pre_activation_residual"] * 2, "conv.output", 'uc.attach(model, "pre_activation_residual")', 30.0, 20.0, 40.0, 6
)
HARMFUL = Gain("drop_edge", "drop_edge", "model", "", -1.0, -3.0, 1.0, 6)
GCN = Measured("graph network", 16, ("cora",), "complete", 31.5, (SHALLOWER, LAYER_NORM, RESIDUAL, HARMFUL))
DEEP = replace(GCN, depth=32)
SUBJECT = Subject("pyg", "GCN", False, ("conv.output", "block"), blocks=16)


def test_the_nearest_depth_of_the_same_kind_counts() -> None:
    there = (GCN, DEEP)
    assert find_measured("graph network", 20, among=there) == GCN
    assert find_measured("graph network", 30, among=there) == DEEP
    assert find_measured("graph network", 64, among=there) == DEEP
    assert find_measured("graph network", 7, among=there) is None
    assert find_measured("graph network", 0, among=there) is None
    assert find_measured("pre-norm decoder", 16, among=there) is None


def test_the_same_cause_counts_before_the_depth() -> None:
    other = replace(DEEP, cause="dimensional")
    assert find_measured("graph network", 18, "dimensional", among=(GCN, other)) == other
    assert find_measured("graph network", 18, "both", among=(GCN, other)) == GCN


def test_models_with_another_verdict_say_nothing() -> None:
    assert find_measured("graph network", 16, "dimensional", among=(GCN,)) is None
    assert find_measured("graph network", 16, "none", among=(GCN,)) is None
    healthy = replace(GCN, cause="none")
    assert find_measured("graph network", 16, "complete", among=(healthy,)) is None
    assert find_measured("graph network", 16, "both", among=(healthy,)) is None
    assert find_measured("graph network", 16, "none", among=(GCN, healthy)) == healthy


def test_the_best_rows_are_named_with_their_numbers_and_the_page() -> None:
    first, second, third = advice.from_measured(GCN, "complete")
    assert (first.cure, second.cure, third.cure) == (
        "shallower",
        "layer_norm",
        "pre_activation_residual",
    )  # one can be attached
    assert first.code == SHALLOWER.code
    assert "+40.0 points (95 %: +38.0 to +42.0)" in first.reason
    assert "16 blocks on cora" in first.reason
    several = replace(GCN, data=("cora", "citeseer", "csbm"))
    assert several.where("complete").endswith("on cora, citeseer and a random graph")
    assert "docs/which-cure.md" in first.reason
    assert "verdict" not in first.reason
    assert "with the verdict complete" in advice.from_measured(GCN, "both")[0].reason


def test_the_numbers_of_a_gain_for_a_table() -> None:
    assert HARMFUL.numbers.split(" ") == ["−1.0", "(−3.0\u00a0to\u00a0+1.0)"]


def test_where_nothing_helped_the_advice_is_not_to_change_the_model() -> None:
    (only,) = advice.from_measured(replace(GCN, gains=(HARMFUL,)), "complete")
    assert only.cure == "none"
    assert "no measured change helped" in only.reason
    assert "−1.0 points (95 %: −3.0 to +1.0)" in only.reason


@pytest.mark.parametrize(
    ("places", "causal", "expected"),
    [
        (("attention.norm", "attention.norm.input"), False, "pre-norm encoder"),
        (("attention.norm", "attention.norm.input"), True, "pre-norm decoder"),
        (("attention.norm",), False, "post-norm encoder"),
        (("block",), False, ""),
    ],
)
def test_kinds_of_models(places: tuple[str, ...], causal: bool, expected: str) -> None:
    assert advice.kind_of_model(Subject("huggingface", "X", causal, places)) == expected


def test_advice_follows_the_measured_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "find_measured", lambda kind, depth, cause: find_measured(kind, depth, cause, (GCN,)))
    assert advice.suggest("complete", "block 3", SUBJECT) == advice.from_measured(GCN, "complete")
    papers = advice.suggest("complete", "block 3", replace(SUBJECT, blocks=64))
    assert papers[0].cure == "contra_norm"
    assert all("nothing was measured" in tip.reason for tip in papers)


def test_tips_against_causes_follow_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = replace(RESIDUAL, low=-5.0)
    monkeypatch.setattr(advice, "find_measured", lambda *place: replace(GCN, gains=(SHALLOWER, weak)))
    tips = advice.suggest("complete", "block 3", SUBJECT)
    causes = (Cause("no_residual", "No residual."), Cause("vanishing_gradients", "Small gradients."))
    found = advice.follow_causes(causes, tips, SUBJECT, "complete")
    assert [tip.cure for tip in found] == ["shallower", "pre_activation_residual", "initialization"]
    assert "measured: +30.0 points (95 %: −5.0 to +40.0) for a graph network of 16 blocks on cora" in found[1].reason
    assert (found[1].code, found[1].place) == (RESIDUAL.code, RESIDUAL.place)  # what the number was measured with
    assert advice.follow_causes((), tips, SUBJECT, "complete") == tips
    monkeypatch.setattr(advice, "find_measured", lambda *place: None)
    unmeasured = advice.follow_causes(causes, tips, SUBJECT, "complete")
    assert [tip.cure for tip in unmeasured] == ["pre_activation_residual", "initialization"]


def test_a_tip_against_a_cause_that_did_harm_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    harm = replace(RESIDUAL, mean=-30.0, low=-40.0, high=-20.0)
    monkeypatch.setattr(advice, "find_measured", lambda *place: replace(GCN, gains=(SHALLOWER, harm)))
    tips = advice.suggest("complete", "block 3", SUBJECT)
    found = advice.follow_causes((Cause("no_residual", "No residual."),), tips, SUBJECT, "complete")
    assert [tip.cure for tip in found] == ["shallower"]


def test_gains_of_tips_are_those_of_models_with_the_same_verdict() -> None:
    """The numbers of tips by verdict and by cause come from the same measurement."""
    other = replace(GCN, depth=17, cause="dimensional", gains=(replace(RESIDUAL, mean=1.0, low=-1.0, high=3.0),))
    assert find_measured("graph network", 17, "complete", among=(other, GCN)) == GCN
