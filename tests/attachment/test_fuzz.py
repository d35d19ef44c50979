"""Cures put in at random and taken out again; `PYTHONPATH=tests python -m attachment.fuzzing` runs as many as asked."""

import random

import pytest
import torch
from torch import nn

import uncollapse as uc

from . import fuzzing
from .tiny_models import build

pytest.importorskip("transformers")
pytest.importorskip("timm")
pytest.importorskip("torch_geometric")


def test_thirty_random_cases_leave_nothing_behind():
    found = fuzzing.fuzz(fuzzing.Config(seed=1000, cases=30))
    assert not found["failed"], "\n".join(found["failed"])
    assert found["passed_with_a_cure"] == 30
    assert len(found["cases_by_model"]) > 8
    assert set(found["applied_by_cure"]) > {"contra_norm", "pair_norm", "feat_scale", "attn_scale"}


def test_a_case_is_the_same_every_time():
    assert fuzzing.check_case(1003) == fuzzing.check_case(1003)


@pytest.mark.parametrize("damage", ["hook", "attribute", "child", "weight"])
def test_damage_is_found(damage, monkeypatch):
    remove = uc.Attachment.remove

    def careless(self):
        model = self.root()
        remove(self)
        layer = next(m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.Linear))
        if damage == "hook":
            layer.register_forward_hook(lambda module, args, output: None)
        elif damage == "attribute":
            layer.left_over = 1
        elif damage == "child":
            layer.add_module("left_over", nn.Identity())
        else:
            layer.weight.data.add_(1e-7).mul_(1 + 1e-6)

    monkeypatch.setattr(uc.Attachment, "remove", careless)
    seed = next(s for s in range(1000, 1100) if _draws_mlp_or_encoder(s))
    with pytest.raises(fuzzing.DamageError, match=f"(?s)Case {seed}.*DamageError"):
        fuzzing.check_case(seed)


def _draws_mlp_or_encoder(seed):
    return random.Random(seed).choice(tuple(fuzzing.MODELS)) in ("mlp", "encoder")


def test_removing_the_cure_that_counts_passes_leaves_the_other_working():
    tiny = build("albert")
    with uc.attach(tiny.model, "contra_norm", scale=0.7):
        alone = tiny.output()
        some = uc.attach(tiny.model, "pair_norm", layers=[0, 2], at="mlp.output")
        assert (tiny.output() - alone).abs().max() > 0.1
        some.remove()  # it alone had asked the model around the layer
        assert torch.equal(tiny.output(), alone)
