"""The small AlexNet."""

import pytest
import torch
from torch import nn

from uncollapse.errors import UsageError
from uncollapse.lab.models.small_alexnet import ALEXNET_LAYERS, SmallAlexNet


def test_at_full_width_it_is_the_papers() -> None:
    model = SmallAlexNet(dim=128, side=64)
    channels = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    features = [
        (module.in_features, module.out_features) for module in model.modules() if isinstance(module, nn.Linear)
    ]
    assert channels == [96, 192, 384, 384, 192]
    assert features == [(192 * 7 * 7, 4096), (4096, 4096), (4096, 128)]


@pytest.mark.parametrize("side", [15, 32, 33])
def test_layers_are_those_on_the_way_to_the_output(side: int) -> None:
    model = SmallAlexNet(dim=5, side=side, width=0.05).eval()
    images = torch.rand(4, 3, side, side)
    found = model.layers(images, ALEXNET_LAYERS)
    assert tuple(found) == ALEXNET_LAYERS
    assert torch.equal(found["output"], model(images))
    assert found["fc7"].shape == (4, model.penultimate)
    x = images
    for name in ALEXNET_LAYERS:
        x = model.get_submodule(name)(x)
        assert torch.equal(x, found[name]), name


def test_what_lies_behind_the_wanted_layer_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SmallAlexNet(side=16, width=0.02).eval()
    monkeypatch.setattr(model.fc6, "forward", lambda x: pytest.fail("fc6 was called"))
    assert model.layers(torch.rand(2, 3, 16, 16), ("conv2", "conv4"))["conv4"].dim() == 4


def test_it_does_not_start_collapsed() -> None:
    torch.manual_seed(0)
    model = SmallAlexNet(dim=16, side=16, width=0.1)
    out = model(torch.rand(64, 3, 16, 16)).detach()
    assert float(out.std(0).mean()) > 0.1


def test_too_small_pictures_and_unknown_layers_are_told() -> None:
    with pytest.raises(UsageError, match="at least 15 pixels, got 14"):
        SmallAlexNet(side=14)
    with pytest.raises(UsageError, match=r"no layer 'conv6'.*conv1, conv2"):
        SmallAlexNet(side=16, width=0.02).layers(torch.rand(1, 3, 16, 16), ("conv6",))
