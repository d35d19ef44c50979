"""Cures put in at random and taken out again; `PYTHONPATH=tests python -m attachment.fuzzing` runs as many as asked."""

import random

import pytest
from torch import nn

import uncollapse as uc

from . import fuzzing


def test_thirty_random_cases_leave_nothing_behind() -> None:
    found = fuzzing.fuzz(fuzzing.Config(seed=1000, cases=30))
    assert not found["failed"], "\n".join(found["failed"])
    assert found["passed_with_a_cure"] == 30
    assert len(found["cases_by_model"]) > 8
    assert set(found["applied_by_cure"]) > {"contra_norm", "pair_norm", "feat_scale", "attn_scale"}
    assert len(found["applied_by_cure"]) > 7
    assert fuzzing.check_case(1003) == fuzzing.check_case(1003)


@pytest.mark.parametrize("damage", ["hook", "attribute", "child", "weight"])
def test_damage_is_found(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = uc.Attachment.remove

    def careless(self: uc.Attachment) -> None:
        layer = next(m for m in self.root().modules() if isinstance(m, nn.LayerNorm | nn.Linear))
        remove(self)
        match damage:
            case "hook":
                layer.register_forward_hook(lambda module, args, output: None)
            case "attribute":
                layer.left_over = 1
            case "child":
                layer.add_module("left_over", nn.Identity())
            case "weight":
                layer.weight.data.add_(1e-7).mul_(1 + 1e-6)

    monkeypatch.setattr(uc.Attachment, "remove", careless)
    names = {seed: random.Random(seed).choice(tuple(fuzzing.MODELS)) for seed in range(1000, 1100)}
    seed = next(seed for seed, name in names.items() if name in ("mlp", "encoder"))
    with pytest.raises(fuzzing.DamageError, match=f"Case {seed}"):
        fuzzing.check_case(seed)
