"""Cures that take the tensor of the block before: the pre-activation residual."""

import copy

import pytest
import torch
from tests.attachment.tiny_models import build
from torch.nn.functional import dropout

import uncollapse as uc


@pytest.mark.parametrize("layers", [None, 2])
def test_convolutions_by_hand(layers: int | None) -> None:
    tiny = build("gcn", blocks=4)
    plain = copy.deepcopy(tiny.model)
    handle = uc.attach(tiny.model, "pre_activation_residual", scale=0.5, layers=layers)
    chosen = (1, 2) if layers is None else (2,)
    assert handle.blocks == chosen  # the last one changes the number of features
    x, previous = tiny.batch["x"], torch.empty(0)
    for number, conv in enumerate(plain.convs):
        x = conv(x, tiny.batch["edge_index"])
        previous = x = x + 0.5 * previous if number in chosen else x
        x = x.relu() if number < 3 else x
    torch.testing.assert_close(tiny.output(), x)


def test_it_carries_what_dropout_has_not_thinned() -> None:
    tiny = build("gcn", blocks=4)
    tiny.model.dropout.p = 0.5
    tiny.model.train()
    plain = copy.deepcopy(tiny.model)
    uc.attach(tiny.model, "pre_activation_residual")
    torch.manual_seed(0)
    found = tiny.output()
    torch.manual_seed(0)
    x, previous = tiny.batch["x"], torch.empty(0)
    for number, conv in enumerate(plain.convs):
        x = conv(x, tiny.batch["edge_index"])
        previous = x = x + previous if number in (1, 2) else x
        x = dropout(x.relu(), 0.5) if number < 3 else x
    torch.testing.assert_close(found, x)


def test_gradients_reach_the_block_before() -> None:
    """A last layer without weights passes nothing on, so that gradients come by the connection alone."""
    tiny = build("gcn", blocks=4)
    torch.nn.init.zeros_(tiny.model.convs[2].lin.weight)
    uc.attach(tiny.model, "pre_activation_residual", layers=2)
    tiny.output().square().sum().backward()
    assert float(tiny.model.convs[1].lin.weight.grad.abs().sum()) > 0


def test_copies_have_their_own_passes() -> None:
    tiny = build("gcn", blocks=4)
    before = tiny.output()
    uc.attach(tiny.model, "pre_activation_residual")
    cured, twin = tiny.output(), copy.deepcopy(tiny.model)
    uc.detach(tiny.model)
    assert torch.equal(tiny.output(), before)
    assert torch.equal(twin(**tiny.batch), cured)


def test_it_next_to_another_cure() -> None:
    """What it carries on is what the other cure has changed."""
    tiny = build("gcn", blocks=4)
    plain = copy.deepcopy(tiny.model)
    uc.attach(tiny.model, "node_norm", layers=":-1")
    uc.attach(tiny.model, "pre_activation_residual")
    x, previous = tiny.batch["x"], torch.empty(0)
    for number, conv in enumerate(plain.convs):
        x = conv(x, tiny.batch["edge_index"])
        x = uc.node_norm(x) if number < 3 else x
        previous = x = x + previous if number in (1, 2) else x
        x = x.relu() if number < 3 else x
    torch.testing.assert_close(tiny.output(), x)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="share"):
        uc.attach(build("albert").model, "pre_activation_residual", at="block")
    with pytest.raises(ValueError, match="second block"):
        uc.attach(build("gcn").model, "pre_activation_residual", layers=0)
    with pytest.raises(ValueError, match="place"):
        uc.attach(build("bert").model, "pre_activation_residual")
