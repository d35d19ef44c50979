"""ResNets as encoders: torchvision's own numbers, with every layer by name."""

from typing import Any

import pytest
import torch

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError
from uncollapse.lab.engine.seeding import seeded
from uncollapse.lab.models.resnet_encoder import RESNET_LAYERS, ResNetEncoder
from uncollapse.lab.models.small_alexnet import SmallAlexNet

torchvision_ops.declare()
models: Any = pytest.importorskip("torchvision.models")

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_it_is_torchvisions() -> None:
    with seeded(0):
        plain = models.resnet18(num_classes=6).eval()
    with seeded(0):
        encoder = ResNetEncoder("resnet18", 6).eval()
    with torch.no_grad():
        assert torch.equal(encoder(IMAGES), plain(IMAGES))
    assert encoder.penultimate == 512


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 8), ("cifar", 32)])
def test_layers_by_name(stem: str, side: int) -> None:
    encoder = ResNetEncoder("resnet18", 6, stem).eval()
    with torch.no_grad():
        found = encoder.layers(IMAGES, RESNET_LAYERS)
        output = encoder(IMAGES)
    shapes = {name: tuple(values.shape[1:]) for name, values in found.items()}
    assert shapes["stem"] == shapes["layer1"] == (64, side, side)
    assert shapes["layer4"] == (512, side // 8, side // 8)
    assert (shapes["pooled"], shapes["output"]) == ((512,), (6,))
    torch.testing.assert_close(found["pooled"], found["layer4"].mean((-2, -1)))
    assert torch.equal(found["output"], output)


def test_layers_behind_the_last_that_is_wanted_are_not_computed() -> None:
    encoder = ResNetEncoder("resnet18", 6).eval()
    encoder.layer2.register_forward_hook(lambda *_: pytest.fail("layer2 was called"))
    assert set(encoder.layers(IMAGES, ("layer1",))) == {"layer1"}
    assert encoder.layers(IMAGES, ()) == {}


def test_an_unknown_layer_names_the_others() -> None:
    with pytest.raises(UsageError, match=r"no layer 'conv5'\. There are: stem, layer1, .*, pooled, output"):
        ResNetEncoder("resnet18", 6).layers(IMAGES, ("conv5",))


def test_the_names_of_both_kinds() -> None:
    assert ResNetEncoder("resnet18", 6).names[-2:] == ("pooled", "output")
    assert SmallAlexNet(6, 15, 0.03).names[-2:] == ("fc7", "output")
