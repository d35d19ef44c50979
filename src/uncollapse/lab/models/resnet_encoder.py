"""ResNets of torchvision as encoders, whose layers are asked for by name as those of the small AlexNet are."""

from typing import Any

from torch import nn

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import import_optional
from uncollapse.lab.models.layered import LayeredEncoder

RESNETS = ("resnet18", "resnet34", "resnet50")
STEMS = ("imagenet", "cifar")
RESNET_LAYERS = ("stem", "layer1", "layer2", "layer3", "layer4", "pooled", "output")


class ResNetEncoder(LayeredEncoder):
    """A ResNet with a linear output; its parts are named as in `LAYERS`.

    Args:
        name: one of `RESNETS`.
        dim: features of the output.
        stem: "imagenet": 7×7 at every second pixel, then a pool; "cifar": 3×3 and no pool, for pictures of 32 pixels.
    """

    names = RESNET_LAYERS

    def __init__(self, name: str = "resnet50", dim: int = 128, stem: str = "imagenet") -> None:
        super().__init__()
        torchvision_ops.declare()
        models: Any = import_optional("torchvision.models", "timm")
        net = getattr(models, name)(num_classes=dim)
        first = [net.conv1, net.bn1, net.relu, net.maxpool]
        if stem == "cifar":
            conv = nn.Conv2d(3, net.conv1.out_channels, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
            first = [conv, net.bn1, net.relu]
        self.stem = nn.Sequential(*first)
        for layer in RESNET_LAYERS[1:5]:
            self.add_module(layer, getattr(net, layer))
        self.pooled = nn.Sequential(net.avgpool, nn.Flatten())
        self.output = net.fc
        self.dim, self.penultimate = dim, net.fc.in_features
