"""Encoders of images: the paper's AlexNet, torchvision's ResNets, layers by name, and the head that predicts depth."""

from typing import Any

import pytest
import torch
from torch import nn

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.models.image_encoder import (
    ALEXNET_LAYERS,
    RESNET_LAYERS,
    DepthHead,
    LayeredEncoder,
    ResNetEncoder,
    SmallAlexNet,
)

torchvision_ops.declare()
models: Any = pytest.importorskip("torchvision.models")

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def alexnet(side: int = 32) -> SmallAlexNet:
    return SmallAlexNet(dim=6, side=side, width=0.05).eval()


def resnet(stem: str = "imagenet") -> ResNetEncoder:
    return ResNetEncoder("resnet18", 6, stem).eval()


def test_alexnet_at_full_width_is_the_papers() -> None:
    with torch.device("meta"):
        model = SmallAlexNet(dim=128, side=64)
    channels = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    linear = [(module.in_features, module.out_features) for module in model.modules() if isinstance(module, nn.Linear)]
    assert channels == [96, 192, 384, 384, 192]
    assert linear == [(192 * 7 * 7, 4096), (4096, 4096), (4096, 128)]


def test_alexnet_does_not_start_collapsed() -> None:
    torch.manual_seed(0)
    model = SmallAlexNet(dim=16, side=16, width=0.1)
    assert float(model(torch.rand(64, 3, 16, 16)).detach().std(0).mean()) > 0.1


def test_initial_weights_are_those_of_their_rule() -> None:
    """The authors draw all weights from N(0, 0.02²); Kaiming's deviation is √(2 / inputs), 0.272 for 27 of conv1."""
    with use_seed(0):
        normal, kaiming = (SmallAlexNet(dim=32, side=16, width=0.5, init=init) for init in ("normal", "kaiming"))
    for name, module in normal.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert float(module.weight.detach().std()) == pytest.approx(0.02, rel=0.05), name
            assert float(module.weight.detach().mean()) == pytest.approx(0.0, abs=0.002), name
            assert module.bias is None or not bool(module.bias.any())
        elif isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            assert bool((module.weight == 1).all())
            assert not bool(module.bias.any())
    assert float(kaiming.get_submodule("conv1")[0].weight.detach().std()) == pytest.approx((2 / 27) ** 0.5, rel=0.05)


def test_resnet_is_torchvisions() -> None:
    with use_seed(0):
        plain = models.resnet18(num_classes=6).eval()
    with use_seed(0):
        encoder = resnet()
    with torch.no_grad():
        assert torch.equal(encoder(IMAGES), plain(IMAGES))
    assert encoder.penultimate == 512


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 8), ("cifar", 32)])
def test_shapes_of_resnet_layers(stem: str, side: int) -> None:
    with torch.no_grad():
        found = resnet(stem).layers(IMAGES, RESNET_LAYERS)
    shapes = {name: tuple(values.shape[1:]) for name, values in found.items()}
    assert shapes["stem"] == shapes["layer1"] == (64, side, side)
    assert shapes["layer4"] == (512, side // 8, side // 8)
    torch.testing.assert_close(found["pooled"], found["layer4"].mean((-2, -1)))


@pytest.mark.parametrize(
    ("encoder", "side", "names"),
    [*((alexnet(side), side, ALEXNET_LAYERS) for side in (15, 32, 33)), (resnet(), 32, RESNET_LAYERS)],
    ids=["alexnet 15", "alexnet 32", "alexnet 33", "resnet"],
)
@torch.no_grad()
def test_layers_lead_to_the_output(encoder: LayeredEncoder, side: int, names: tuple[str, ...]) -> None:
    x = images = torch.rand(4, 3, side, side)
    found = encoder.layers(images, names)
    assert tuple(found) == encoder.names == names
    for name in names:
        x = encoder.get_submodule(name)(x)
        assert torch.equal(x, found[name]), name
    assert torch.equal(x, encoder(images))
    assert found[names[-2]].shape == (4, encoder.penultimate)


@pytest.mark.parametrize(("encoder", "wanted", "later"), [(alexnet(), "conv4", "fc6"), (resnet(), "layer1", "layer2")])
def test_later_layers_are_not_computed(encoder: LayeredEncoder, wanted: str, later: str) -> None:
    encoder.get_submodule(later).register_forward_hook(lambda *_: pytest.fail(f"{later} was called"))
    assert set(encoder.layers(IMAGES, (wanted,))) == {wanted}
    assert encoder.layers(IMAGES, ()) == {}


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="15"):
        SmallAlexNet(side=14)
    with pytest.raises(UsageError, match="conv1, conv2"):
        alexnet().layers(IMAGES, ("conv6",))


def test_the_depth_head_gives_maps_of_its_size() -> None:
    head = DepthHead(5, side=12, width=4)
    for side in (1, 3, 16):
        assert head(torch.randn(2, 5, side, side)).shape == (2, 12, 12)


def test_the_depth_head_learns_positions() -> None:
    """A ramp in the features is read back as a ramp."""
    ramp = torch.linspace(-1, 1, 6).expand(6, 6)
    features = torch.stack([ramp, ramp.T])[None] * torch.tensor([1.0, -1.0, 0.5])[:, None, None, None]
    wanted = torch.nn.functional.interpolate(features[:, :1], (12, 12), mode="bilinear")[:, 0]
    with use_seed(0):
        head = DepthHead(2, side=12, width=8)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
        losses = []
        for _ in range(60):
            loss = (head(features) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
