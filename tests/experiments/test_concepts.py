"""The examples of the page on concepts show what they are said to show."""

import json
import math
from dataclasses import replace

import torch
from experiments.concepts import Config

from experiments import concepts

SMALL = Config(tokens=60, depth=12, width=32, sequence=16, scales=(1.0,))


def test_the_three_states_differ_in_what_they_are_named_for() -> None:
    found = concepts.spheres(SMALL)
    figures = {name: state["figures"] for name, state in found.items()}
    assert figures["complete collapse"]["mean_cosine"] > 0.9
    assert abs(figures["dimensional collapse"]["mean_cosine"]) < 0.1
    ranks = [figures[name]["effective_rank"] for name in ("healthy", "dimensional collapse", "complete collapse")]
    assert ranks == sorted(ranks, reverse=True)
    for state in found.values():
        assert math.isclose(sum(state["spectrum"]), 1, abs_tol=1e-3)
        assert torch.allclose(torch.tensor(state["points"]).norm(dim=-1), torch.ones(60), atol=1e-3)


def test_pairs_are_close_or_not_and_spread_or_not() -> None:
    good, collapsed, random, neither = (of["figures"] for of in concepts.pairs(SMALL).values())
    assert max(good["alignment"], collapsed["alignment"]) < 0.1 < min(random["alignment"], neither["alignment"])
    assert max(good["uniformity"], random["uniformity"]) < min(collapsed["uniformity"], neither["uniformity"])


def test_a_step_of_contra_norm_spreads_the_points() -> None:
    found = concepts.step(SMALL)
    assert found["after"]["figures"]["uniformity"] < found["before"]["figures"]["uniformity"]
    assert len(found["moved"]) == SMALL.moved


def test_a_deep_random_transformer_collapses_and_the_cure_prevents_it() -> None:
    found = concepts.depth(replace(SMALL, depth=24))
    plain, before, cured = found.values()
    assert plain["mean_cosine"][-1] > 0.9 > before["mean_cosine"][-1]
    assert cured["mean_cosine"][-1] < 0.5
    assert len(plain["effective_rank"]) == 25
    assert json.loads(json.dumps(found)) == found
    weights = [concepts.transformer(SMALL, False).layers[1].linear1.weight for _ in range(2)]
    assert torch.equal(*weights)
