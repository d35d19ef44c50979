"""MoCo's momentum encoder: the follower, the queue, and the order in which they change."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from uncollapse.errors import UsageError
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.models.image_encoder import MomentumEncoder, SmallAlexNet, add_mlp


def model(queue: int = 7, ema: float = 0.9, groups: int = 1) -> MomentumEncoder:
    with use_seed(0):
        return MomentumEncoder(SmallAlexNet(4, 15, 0.03), queue, ema, groups)


def views(seed: int, count: int = 3) -> Tensor:
    return torch.randn(count, 3, 15, 15, generator=torch.Generator().manual_seed(seed))


def rows(count: int, first: int = 0) -> Tensor:
    """Rows that say which one they are."""
    return torch.arange(first, first + count).float()[:, None].expand(-1, 4)


def test_at_its_start() -> None:
    moco = model()
    for own, leading in zip(moco.follower.parameters(), moco.encoder.parameters(), strict=True):
        assert torch.equal(own, leading)
        assert own is not leading
        assert not own.requires_grad
        assert leading.requires_grad
    torch.testing.assert_close(moco.queue.norm(dim=1), torch.ones(7))
    assert {"queue", "pointer"} <= moco.state_dict().keys()  # a checkpoint holds them


def test_the_follower_steps_before_it_looks_and_the_queue_changes_after() -> None:
    """A step by hand, as MoCo's pseudocode has it."""
    moco = model().double()
    with torch.no_grad():
        for parameter in moco.encoder.parameters():
            parameter += 0.1
    before, queue = copy.deepcopy(moco), moco.queue.clone()
    with torch.no_grad():
        for own, leading in zip(before.follower.parameters(), before.encoder.parameters(), strict=True):
            own.copy_(0.9 * own + 0.1 * leading)
        x = F.normalize(before.encoder(views(0).double()), dim=1)
        y = F.normalize(before.follower(views(1).double()), dim=1)
    found = moco(views(0).double(), views(1).double())
    torch.testing.assert_close(found.x, x.to(found.x.dtype))
    torch.testing.assert_close(found.y, y.to(found.y.dtype))
    assert torch.equal(found.queue, queue)
    assert torch.equal(moco.queue[:3], found.y)
    assert torch.equal(moco.queue[3:], queue[3:])
    assert int(moco.pointer) == 3
    for own, leading in zip(moco.follower.parameters(), before.follower.parameters(), strict=True):
        torch.testing.assert_close(own, leading)


def test_gradients_reach_the_encoder_alone() -> None:
    moco = model()
    found = moco(views(0), views(1))
    ((found.x @ found.queue.T).exp().sum() - (found.x * found.y).sum()).backward()  # after the queue was overwritten
    assert all(parameter.grad is not None for parameter in moco.encoder.parameters())
    assert all(parameter.grad is None for parameter in moco.follower.parameters())
    assert not found.y.requires_grad


@pytest.mark.parametrize(("size", "batch"), [(7, 3), (6, 3), (4, 4), (3, 5), (1, 4)])
def test_the_queue_has_the_newest_rows(size: int, batch: int) -> None:
    moco, put = model(size), []
    for step in range(5):
        moco.enqueue(rows(batch, step * batch))
        put += range(step * batch, (step + 1) * batch)
        assert int(moco.pointer) == len(put) % size
        newest = [number for place, number in enumerate(put) if place >= len(put) - size]
        there = set(moco.queue[:, 0].tolist()) & set(map(float, put))
        assert there == set(map(float, newest))
    oldest = int(moco.pointer)
    assert moco.queue[:, 0].roll(-oldest).tolist() == [float(number) for number in put[-size:]]


def test_a_checkpoint_brings_the_queue_back() -> None:
    first, second = model(), model()
    first(views(0), views(1))
    second.load_state_dict(first.state_dict())
    a, b = (moco(views(2), views(3)) for moco in (first, second))
    assert torch.equal(a.queue, b.queue)
    assert torch.equal(a.y, b.y)
    assert torch.equal(first.queue, second.queue)


def test_half_precision_ends_in_float32() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = model()(views(0), views(1))
    assert found.x.dtype == found.y.dtype == found.queue.dtype == torch.float32
    torch.testing.assert_close(found.y.norm(dim=1), torch.ones(3))


def test_a_hidden_layer_before_the_output() -> None:
    encoder: Any = SmallAlexNet(4, 15, 0.03)
    add_mlp(encoder)
    encoder.eval()
    layers = encoder.layers(views(0), ("fc7", "output"))
    hidden, relu, last = encoder.output
    assert hidden.weight.shape == (encoder.penultimate,) * 2
    torch.testing.assert_close(layers["output"], last(F.relu(hidden(layers["fc7"]))))
    assert isinstance(relu, torch.nn.ReLU)


def test_each_group_has_statistics_of_its_own() -> None:
    """A group is encoded as if it were the batch; the follower's groups are drawn, and its rows come back in order."""
    moco, first, second = model(groups=3), views(0, 8), views(1, 8)
    plain = copy.deepcopy(moco)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4])
    with torch.no_grad():
        x, y = moco.queries(first), moco.keys(second, order)
        for rows in ([0, 1, 2], [3, 4, 5], [6, 7]):
            torch.testing.assert_close(x[rows], F.normalize(plain.encoder(first[rows]), dim=1))
            alone = F.normalize(plain.follower(second[order[rows]]), dim=1)
            torch.testing.assert_close(y[order[rows]], alone)
        assert not torch.allclose(y, model().keys(second), atol=1e-3)


def test_groups_are_drawn_anew_and_follow_the_seed() -> None:
    moco = model(groups=2)
    torch.manual_seed(3)
    orders = [moco.draw_order(16).tolist() for _ in range(2)]
    assert orders[0] != orders[1]
    torch.manual_seed(3)
    assert moco.draw_order(16).tolist() == orders[0]
    before = torch.get_rng_state()
    assert model().draw_order(5).tolist() == [0, 1, 2, 3, 4]  # nothing is drawn without groups
    assert torch.equal(torch.get_rng_state(), before)


def test_a_group_needs_two_images() -> None:
    with pytest.raises(UsageError, match="groups"):
        model(groups=2)(views(0), views(1))


@pytest.mark.parametrize(("queue", "ema"), [(0, 0.9), (4, 1.0), (4, -0.1)])
def test_bad_sizes(queue: int, ema: float) -> None:
    with pytest.raises(UsageError, match="ema"):
        model(queue, ema)
