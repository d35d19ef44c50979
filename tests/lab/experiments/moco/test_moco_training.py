"""What a run of MoCo is told, and what it is trained for."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.lab.experiments.contrastive.tiny_images import pictures
from torch import Tensor
from torch.nn import functional as F

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import build, identity
from uncollapse.lab.data.image.image_source import ImageSet
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.contrastive.config import Data
from uncollapse.lab.experiments.contrastive.objectives import ObjectiveConfig, queue_objective
from uncollapse.lab.experiments.moco import config as momentum
from uncollapse.lab.experiments.moco.config import MomentumConfig
from uncollapse.lab.experiments.moco.recipe import MomentumTraining, batch_statistics, marked_share
from uncollapse.lab.models.image_encoder import ResNetEncoder

TINY = MomentumConfig(encoder="small_alexnet", width=0.03, dim=4, side=15, queue=10, batch=6, epochs=3)


def unit(*shape: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double(), dim=-1)


def training(config: MomentumConfig, count: int = 20) -> MomentumTraining:
    train, validation, test = (pictures(count, seed=seed) for seed in range(3))
    data = Data(ImageSet("made", train, test, {}), train, {"train": train, "validation": validation, "test": test})
    return MomentumTraining(momentum.build_momentum_encoder(config), config, data, Runtime(device="cpu"))


@pytest.mark.parametrize("within", [True, False])
def test_the_objective_is_the_authors(within: bool) -> None:
    """As their MoCo computes it: a cross entropy of (x·y, x·queue)/τ, and distances to the queue and in the batch."""
    x, y, queue = unit(5, 4, seed=0), unit(5, 4, seed=1), unit(9, 4, seed=2)
    logits = torch.cat([(x * y).sum(1, keepdim=True), x @ queue.T], 1) / 0.2
    contrast = F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))
    align = (x - y).norm(dim=1).pow(1.5).mean()
    squared = (2 - 2 * x @ queue.T).flatten()
    squared = torch.cat([squared, torch.pdist(x).square()]) if within else squared
    uniform = squared.mul(-3).exp().mean().log()
    config = ObjectiveConfig(contrast=0.5, temperature=0.2, align=3.0, alpha=1.5, uniform=2.0, t=3.0)
    got = queue_objective(config, x, y, queue, within)
    torch.testing.assert_close(got, 0.5 * contrast + 3 * align + 2 * uniform, check_dtype=False)
    alone = replace(config, contrast=0.0, align=0.0)
    torch.testing.assert_close(queue_objective(alone, x, y, queue, within), 2 * uniform, check_dtype=False)


def test_settings_that_have_no_effect_make_no_other_run() -> None:
    plain = MomentumConfig()
    assert MomentumConfig(width=0.5, within=False, t=5.0) == plain
    assert replace(TINY, stem="cifar") == TINY
    cosine = MomentumConfig(schedule="cosine")
    assert identity("moco", replace(cosine, falls=(0.3,))) == identity("moco", cosine)
    assert replace(plain, stem="cifar") != plain
    with pytest.raises(UsageError, match="epochs"):  # unlike contrast, which may judge a start
        build(MomentumConfig, {"epochs": 0})
    with pytest.raises(UsageError, match="probe_falls"):
        MomentumConfig(probe_falls=(2.0,))
    with pytest.raises(UsageError, match="falls"):
        MomentumConfig(falls=(2.0,))


def test_the_encoder_at_its_start_does_not_depend_on_the_objective() -> None:
    first, second = (
        momentum.build_momentum_encoder(replace(TINY, **changes)) for changes in ({}, {"align": 1.0, "mlp": False})
    )
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert isinstance(momentum.build_encoder(MomentumConfig(encoder="resnet18")), ResNetEncoder)
    assert len(momentum.build_encoder(replace(TINY, mlp=True)).output) == 3


def test_how_the_learning_rate_falls() -> None:
    steps = 3 * 3  # epochs of 20 pictures in batches of 6
    by_steps, by_cosine = (training(replace(TINY, schedule=name)).task().schedule for name in ("steps", "cosine"))
    assert by_steps is not None
    assert by_cosine is not None
    falls = [round(by_steps(step), 6) for step in range(steps)]
    assert falls == [1.0] * 5 + [0.1] * 2 + [0.01] * 2
    published = [0.5 * (1 + math.cos(math.pi * epoch / 3)) for epoch in range(3) for _ in range(3)]
    assert [by_cosine(step) for step in range(steps)] == pytest.approx(published)


def test_a_step_changes_the_encoder_and_the_queue() -> None:
    made = training(TINY)
    model: Any = made.encoder
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    task = made.task()
    task.loss(model, next(iter(made.batches(1)))).backward()
    task.optimizer.step()
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"queue", "pointer", "encoder.conv1.0.weight", "follower.conv1.1.running_mean"} <= changed
    assert "follower.conv1.0.weight" not in changed  # it was where the encoder was, and follows in the next step


def test_it_is_judged_by_the_encoder_in_evaluation_mode() -> None:
    made = training(TINY)
    model = made.encoder
    queue = model.queue.clone()
    found = made.evaluate(model)
    assert found == made.evaluate(model.encoder)
    assert set(found) == {"alignment", "uniformity"}
    assert torch.equal(model.queue, queue)
    names = [layer.name for layer in made.diagnosis(model.encoder).layers]
    assert (names[0], names[-1]) == ("conv1", "output")


def test_cost_grows_with_the_work() -> None:
    def cost(**changes: Any) -> float:
        return momentum.cost(MomentumConfig(**changes))

    assert cost(encoder="resnet18") < cost(encoder="resnet34") < cost()
    assert cost(data="imagenet100") < cost() / 5
    assert cost(encoder="resnet18", side=32) < cost(encoder="resnet18", side=32, stem="cifar")
    assert 0 < momentum.cost(TINY) < momentum.cost(replace(TINY, epochs=30))


def naive_share(queries: Tensor, keys: Tensor, places: Tensor) -> float:
    """Loops over batches, images, and the groups of other batches."""
    count, groups, _ = keys.shape
    moments = [(rows.flatten(0, 1).mean(0), rows.flatten(0, 1).std(0)) for rows in (queries, keys)]
    sizes = [len(part) for part in torch.arange(places.shape[1]).tensor_split(groups)]
    group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
    shares = []
    for batch in range(count):
        for image in range(places.shape[1]):
            query = (queries[batch, group_of[image]] - moments[0][0]) / moments[0][1]
            partner = (keys[batch, group_of[int(places[batch, image])]] - moments[1][0]) / moments[1][1]
            for other in range(count):
                for group in range(groups) if other != batch else ():
                    stranger = (keys[other, group] - moments[1][0]) / moments[1][1]
                    shares.append(float((query - stranger).norm() > (query - partner).norm()))
    return sum(shares) / len(shares)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_leak_is_that_of_a_loop(groups: int) -> None:
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(4, groups, 5, generator=draw).double()
    queries = 3 + 2 * keys + torch.randn(4, groups, 5, generator=draw).double()
    places = torch.stack([torch.randperm(7, generator=draw) for _ in range(4)])
    assert marked_share(queries, keys, places) == pytest.approx(naive_share(queries, keys, places))
    assert groups > 1 or marked_share(5 - 2 * keys, -keys, places) == 1.0  # a shift and a scale hide nothing


def test_statistics_are_the_means_that_batch_norms_subtract() -> None:
    model = momentum.build_momentum_encoder(replace(TINY, groups=2))
    images = torch.randn(6, 3, 15, 15, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = batch_statistics(model.encoder, lambda: model.queries(images))
        convolution = model.encoder.conv1[0]
        means = torch.stack([convolution(part).mean((0, 2, 3)) for part in (images[:3], images[3:])])
    torch.testing.assert_close(found[:, : means.shape[1]], means)
    assert not model.encoder.conv1[1]._forward_pre_hooks


def test_groups_hide_which_views_belong_together() -> None:
    """Two views of a batch have nearly the same statistics; groups of different images do not."""
    config = replace(TINY, width=0.1, batch=24, least_area=0.8, flip=0.0, jitter=0.0, hue=0.0, grey=0.0)
    whole, split = (training(replace(config, groups=groups), 240) for groups in (1, 4))
    running = whole.encoder.encoder.conv1[1].running_mean.clone()
    leaks = [made.leak()["leak"] for made in (whole, split)]
    assert leaks[0] > 0.9
    assert leaks[1] < 0.7
    assert torch.equal(whole.encoder.encoder.conv1[1].running_mean, running)
    assert training(replace(config, batch=20)).leak() == {}  # a single batch


def test_without_held_out_images_the_test_images_are_measured() -> None:
    made = training(TINY)
    made.data = replace(made.data, splits={name: made.data.splits[name] for name in ("train", "test")})
    assert made.task().evaluate is None
    assert made.data.measured == "test"
    assert len(made.pairs(made.encoder.encoder, made.data.measured)[0]) == 20
