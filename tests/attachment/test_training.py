"""Cures learn: in a frozen model, with an optimizer that was made before, in a Trainer that is resumed."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import uncollapse as uc

from .by_hand import TEXT, transformers
from .tiny_models import build


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_learned_scale_begins_in_the_dtype_of_the_model(dtype: Any) -> None:
    handle = uc.attach(build("encoder").model.to(dtype), "contra_norm", scale=0.1, learnable=True)
    assert len(handle.parameters()) == 3
    assert all(torch.equal(scale, torch.full((16,), 0.1, dtype=dtype)) for scale in handle.parameters())


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize(("name", "cure"), [("encoder", "pair_norm"), ("gcn", "drop_edge")])
def test_a_cure_is_in_the_mode_of_its_module(name: str, cure: str, mode: bool) -> None:
    model = build(name).model.train(mode)
    handle = uc.attach(model, cure)
    assert {module.training for one in handle.cures.values() for module in one.modules()} == {mode}
    model.train(not mode)
    assert {one.training for one in handle.cures.values()} == {not mode}


@pytest.mark.parametrize("name", ["bert", "timm_vit", "encoder", "encoder_pre_norm", "gcn"])
def test_the_cure_of_a_frozen_model_learns(name: str) -> None:
    tiny = build(name)
    tiny.model.requires_grad_(False)
    own = copy.deepcopy(tiny.model.state_dict())
    handle = uc.attach(tiny.model, "contra_norm", scale=0.6, learnable=True, **tiny.where)
    learned = [p for p in tiny.model.parameters() if p.requires_grad]
    assert len(learned) == len(handle.cures)
    optimizer = torch.optim.SGD(learned, lr=1.0)
    torch.manual_seed(0)
    goal, losses = torch.randn_like(tiny.output()), []
    for _ in range(5):
        loss = (tiny.output() - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1e-3
    state = tiny.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in own.items())


def test_an_optimizer_that_was_made_before() -> None:
    tiny = build("encoder")
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=1.0)
    handle = uc.attach(tiny.model, "contra_norm", scale=0.5, learnable=True)
    optimizer.add_param_group({"params": handle.parameters()})
    tiny.output().square().sum().backward()
    optimizer.step()
    assert all(bool((p != 0.5).any()) for p in handle.parameters())


def train(where: Path, resume: str | None = None) -> Any:
    """Three steps of a Trainer, with dropout and padding."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
    uc.attach(model, "contra_norm", scale=0.3, learnable=True)
    tokens = torch.randint(3, 40, (12, 6), generator=torch.Generator().manual_seed(1))
    rows = [
        {"input_ids": row, "attention_mask": (torch.arange(6) < 3 + i % 4).long(), "labels": i % 2}
        for i, row in enumerate(tokens)
    ]
    options = {"max_steps": 3, "save_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 3}
    quiet = {"report_to": [], "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(output_dir=str(where), **options, **quiet)
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
    return model


def test_a_training_that_is_resumed_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = train(tmp_path / "whole")
    learned = [p for name, p in whole.named_parameters() if "uncollapse" in name]
    assert len(learned) == 3
    assert all((p - 0.3).abs().min() > 0 for p in learned)
    resumed = train(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-1"))
    for (name, p), (_, q) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, msg=name)


def test_it_is_said_when_the_parameters_of_a_cure_are_frozen() -> None:
    """PEFT freezes all parameters of a model, also those of a cure that was attached before."""
    tiny = build("bert")
    handle = uc.attach(tiny.model, "contra_norm", scale=0.1, learnable=True)
    tiny.model.requires_grad_(False)
    tiny.model.train()
    with pytest.warns(UserWarning, match="frozen"):
        tiny.output()
    for parameter in handle.parameters():
        parameter.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny.output().sum().backward()
    assert all(parameter.grad is not None for parameter in handle.parameters())
