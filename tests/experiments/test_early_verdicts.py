"""Verdicts after a tenth of the training."""

from dataclasses import replace

import pytest
import torch
from experiments.early_verdicts import early_verdict, stored_problem, train_a_tenth

from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime

ARENA = {"recipe": "arena", "config": {"task": "gcn", "data": "karate", "depth": 4}}
GCN = {"recipe": "gcn-depth", "config": {"data": "karate", "layers": 4, "norm": "none"}}


@pytest.mark.parametrize("record", [ARENA, GCN], ids=lambda record: record["recipe"])
def test_a_tenth_of_a_training_is_its_beginning(record: dict[str, object]) -> None:
    whole = stored_problem(record, Runtime())
    tenth = replace(whole.options, epochs=whole.options.epochs // 10, select=None, patience=None)
    fit(whole.task, tenth, Runtime())
    weights = dict(train_a_tenth(record, None).task.model.named_parameters())
    for name, weight in whole.task.model.named_parameters():
        assert torch.equal(weight, weights[name]), name


def test_the_verdict_is_one_of_the_kinds() -> None:
    assert early_verdict(ARENA, None) in ("none", "complete", "dimensional", "both")
