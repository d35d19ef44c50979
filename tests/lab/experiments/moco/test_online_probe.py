"""The linear classifier on a frozen encoder: it learns, leaves the encoder alone, and goes on where it was stopped."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.experiments.contrastive.tiny_images import pictures

from uncollapse.errors import NotFiniteError
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.experiments.moco import config as momentum
from uncollapse.lab.experiments.moco.config import MomentumConfig
from uncollapse.lab.experiments.moco.recipe import OnlineProbe

pytest.importorskip("accelerate")

CONFIG = MomentumConfig(
    encoder="small_alexnet", width=0.05, dim=4, side=15, probe_epochs=6, probe_batch=10, probe_lr=1.0
)
EXPERIMENT = "0f3a"


def probe(config: MomentumConfig = CONFIG, **runtime: Any) -> OnlineProbe:
    return OnlineProbe(
        momentum.build_encoder(config), config, pictures(30), Runtime(device="cpu", **runtime), EXPERIMENT
    )


def seen(made: OnlineProbe) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels of the training pictures, as an epoch has them."""
    rows, labels = [], []
    for batch in made.batches(1):
        rows.append(made.encoder.layers(batch.images, ("fc7",))["fc7"].detach())
        labels.append(batch.labels)
    return torch.cat(rows), torch.cat(labels)


def test_it_learns_and_the_encoder_stays() -> None:
    made = probe()
    before = {name: tensor.clone() for name, tensor in made.encoder.state_dict().items()}
    with use_threads(1):
        made.fit()
    assert made.evaluate(*seen(made))["top1"] > 0.8  # of three classes, by color
    assert all(torch.equal(before[name], tensor) for name, tensor in made.encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in made.encoder.parameters())


def test_shares_by_hand() -> None:
    made = probe()
    made.head = torch.nn.Linear(6, 6, bias=False)
    made.head.weight.data = torch.eye(6)
    rows = torch.tensor([[6.0, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    shares = made.evaluate(rows, torch.tensor([0, 0, 4]))
    assert shares == {"top1": pytest.approx(1 / 3), "top5": pytest.approx(2 / 3)}
    made.head = torch.nn.Linear(6, 5)
    assert set(made.evaluate(rows, torch.tensor([0, 0, 4]))) == {"top1"}  # all five would always be right
    made.head.weight.data[0, 0] = torch.inf
    with pytest.raises(NotFiniteError, match="smaller probe_lr"):
        made.evaluate(rows, torch.tensor([0, 0, 4]))


def test_epochs_have_new_crops_of_all_pictures() -> None:
    made = probe()
    first, again, second = (list(made.batches(epoch)) for epoch in (1, 1, 2))
    assert sum(map(len, first)) == sum(map(len, second)) == 30
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].images, second[0].images)


def test_ctrl_c_and_on_to_the_same_end(tmp_path: Path) -> None:
    def press(done: int, total: int, figures: Any) -> None:
        if done == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with use_threads(1):
        whole = probe()
        whole.fit()
        with pytest.raises(KeyboardInterrupt, match="epoch 3"):
            probe(checkpoints=tmp_path, progress=press).fit()
        assert [path.name for path in (tmp_path / "linear").iterdir()] == ["step-000000007"]
        resumed = probe(checkpoints=tmp_path)
        resumed.fit()
    assert torch.equal(resumed.head.weight, whole.head.weight)
    resumed.clear()
    assert list(tmp_path.iterdir()) == []


def test_the_settings_count() -> None:
    heads = []
    with use_threads(1):
        short = replace(CONFIG, probe_epochs=2)
        for config in (short, replace(short, probe_drop=0.5), replace(short, probe_lr=0.1)):
            made = probe(config)
            made.fit()
            heads.append(made.head.weight)
    assert not torch.equal(heads[0], heads[1])
    assert heads[2].norm() < heads[0].norm()
