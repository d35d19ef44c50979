"""Encoders of images whose layers can be read by name, and the head that predicts depth from such a layer."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse import distributed
from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, did_you_mean, import_optional


class LayeredEncoder(nn.Module):
    """An encoder of images that is a sequence of named layers.

    `names` lists its submodules in the order in which they are called. The last is the output; the one before it has
    the features that are evaluated.
    """

    names: ClassVar[tuple[str, ...]]

    def forward(self, images: Tensor) -> Tensor:
        """Encode images (b, 3, h, w) as rows (b, dim), which are not normalized."""
        output = self.names[-1]
        return self.layers(images, (output,))[output]

    def layers(self, images: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the outputs of some layers by name, maps (b, c, h, w) or features (b, d), and call no later ones."""
        wanted = set(names)
        if unknown := wanted - set(self.names):
            hint = did_you_mean(min(unknown), self.names)
            raise UsageError(f"The encoder has no layer {min(unknown)!r}.{hint} There are: {', '.join(self.names)}.")
        found, x = {}, images
        for name in self.names[: 1 + max(map(self.names.index, wanted), default=-1)]:
            x = self.get_submodule(name)(x)
            if name in wanted:
                found[name] = x
        return found


CONVOLUTIONS, HIDDEN = (96, 192, 384, 384, 192), 4096  # channels and features at full width
POOLED = (1, 2, 5)  # convolutions that a max pooling of 3×3 with stride 2 follows
ALEXNET_LAYERS = (*(f"conv{number}" for number in range(1, 6)), "fc6", "fc7", "output")
INITS = ("kaiming", "normal")
INIT_STD = 0.02  # of "normal"
LEAST_SIDE = 15  # pixels: three poolings leave nothing of a smaller image


class SmallAlexNet(LayeredEncoder):
    """The small AlexNet that Wang & Isola (arXiv 2005.10242) train on STL-10, for any width and image size.

    Five convolutions of 3×3, two fully connected layers and a linear output. BatchNorm and ReLU follow each but the
    output. Its layers are `ALEXNET_LAYERS`.

    Args:
        dim: Features of the output.
        side: Height and width of the images in pixels.
        width: Factor of all channels and features but the output's.
        channels: Channels of the images.
        init: Initial weights, one of `INITS`. "kaiming" keeps the variance through ReLUs; "normal" is the authors'
            N(0, 0.02²), whatever the size of a layer.
    """

    names = ALEXNET_LAYERS

    def __init__(
        self, dim: int = 128, side: int = 64, width: float = 1.0, channels: int = 3, init: str = "kaiming"
    ) -> None:
        super().__init__()
        if side < LEAST_SIDE:
            raise UsageError(f"A small AlexNet takes images of at least {LEAST_SIDE} pixels, got {side}.")
        self.dim, self.side, self.width = dim, side, width
        sizes = [channels, *(scale_size(size, width) for size in CONVOLUTIONS)]
        for number in range(1, 6):
            self.add_module(f"conv{number}", _conv_block(sizes[number - 1], sizes[number], number in POOLED))
            side = (side - 3) // 2 + 1 if number in POOLED else side
        hidden = scale_size(HIDDEN, width)
        self.fc6 = nn.Sequential(nn.Flatten(), *_linear_block(sizes[-1] * side * side, hidden))
        self.fc7 = nn.Sequential(*_linear_block(hidden, hidden))
        self.output = nn.Linear(hidden, dim)
        self.penultimate = hidden
        _init_weights(self, init)


def scale_size(size: int, width: float) -> int:
    """Return a size at another width, at least 1."""
    return max(1, round(size * width))


def _conv_block(inputs: int, outputs: int, pooled: bool = False) -> nn.Sequential:
    pool = [nn.MaxPool2d(3, 2)] if pooled else []
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), *pool)


def _linear_block(inputs: int, outputs: int) -> Iterator[nn.Module]:
    yield nn.Linear(inputs, outputs, bias=False)
    yield nn.BatchNorm1d(outputs)
    yield nn.ReLU(inplace=True)


@torch.no_grad()
def _init_weights(model: nn.Module, init: str) -> None:
    """Draw all weights; biases are 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            if init == "normal":
                nn.init.normal_(module.weight, std=INIT_STD)
            else:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


RESNETS = ("resnet18", "resnet34", "resnet50")
STEMS = ("imagenet", "cifar")
RESNET_LAYERS = ("stem", "layer1", "layer2", "layer3", "layer4", "pooled", "output")


class ResNetEncoder(LayeredEncoder):
    """A ResNet of torchvision with a linear output. Its layers are `RESNET_LAYERS`.

    Args:
        name: One of `RESNETS`.
        dim: Features of the output.
        stem: "imagenet": a convolution of 7×7 with stride 2, then a pooling; "cifar": 3×3 with stride 1 and no
            pooling, for images of 32 pixels.
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


class DepthHead(nn.Module):
    """Predict the depth of every pixel from the map of a layer.

    Two convolutions of 3×3, bilinear interpolation to the size of the depth maps, two more convolutions.

    Args:
        channels: Channels of the layer.
        side: Height and width of the depth maps in pixels.
        width: Channels in between.
    """

    def __init__(self, channels: int, side: int, width: int = 64) -> None:
        super().__init__()
        self.side = side
        self.before = nn.Sequential(_conv_block(channels, width), _conv_block(width, width))
        self.after = nn.Sequential(_conv_block(width, width), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, features: Tensor) -> Tensor:
        """Map features (b, channels, h, w) to standardized depths (b, side, side)."""
        x = F.interpolate(self.before(features), (self.side, self.side), mode="bilinear")
        depths: Tensor = self.after(x)[:, 0]
        return depths


class MomentumOutput(NamedTuple):
    """Outputs for a batch: x (b, d) of the encoder, y (b, d) of its follower, queue (K, d) before this batch."""

    x: Tensor
    y: Tensor
    queue: Tensor


class MomentumEncoder(nn.Module):
    """An encoder, its follower (an exponential moving average without gradients) and the queue of follower outputs.

    Queue and pointer are buffers, so checkpoints contain them. With several processes every queue gets the outputs of
    all ranks in the order of the whole batch, so all queues are equal.

    BatchNorm leaks: the first and the second views of a batch have nearly the same statistics, since they show the same
    images, while rows of the queue were normalized with those of other batches. So the statistics mark the partner of
    a view among the rows of the queue. MoCo (arXiv 1911.05722) computes them per device and shuffles the batch among
    devices for the follower. `groups` does so in one process: both encoders see a batch in groups, each with statistics
    of its own, and the follower's groups are drawn at random. With several processes each splits its share; on GPUs,
    where statistics are synchronized, the groups of the same number count as one.

    Args:
        encoder: Encoder with an attribute `dim`, which is trained.
        queue: Number of outputs in the queue. It starts with random ones.
        ema: Decay of the moving average in a step.
        groups: Number of groups of a batch. 1: the whole batch has the same statistics.
    """

    queue: Tensor
    pointer: Tensor

    def __init__(self, encoder: Any, queue: int, ema: float = 0.999, groups: int = 1) -> None:
        super().__init__()
        if queue < 1 or groups < 1 or not 0 <= ema < 1:
            raise UsageError(f"queue and groups must be at least 1 and ema in [0, 1), got {queue}, {groups} and {ema}.")
        self.encoder, self.ema, self.groups = encoder, ema, groups
        self.follower = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue, encoder.dim), dim=-1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))  # the oldest row, which is replaced next

    def forward(self, first: Tensor, second: Tensor) -> MomentumOutput:
        """Encode two views (b, 3, h, w) as unit rows. The follower is updated before it encodes, the queue after."""
        x = self.queries(first)
        with torch.no_grad():
            self.follow()
            y = self.keys(second)
            before = self.queue.clone()  # the backward pass still needs the rows that are overwritten now
            self.enqueue(distributed.gather_rows(y))
        return MomentumOutput(x, y, before)

    def queries(self, images: Tensor) -> Tensor:
        """Encode images (b, 3, h, w) as unit rows (b, d), in groups as they come."""
        return self._encode(self.encoder, images)

    @torch.no_grad()
    def keys(self, images: Tensor, order: Tensor | None = None) -> Tensor:
        """Encode images (b, 3, h, w) by the follower as unit rows (b, d). order: of the images in the groups."""
        if self.groups == 1:
            return self._encode(self.follower, images)
        order = self.draw_order(len(images)) if order is None else order
        return self._encode(self.follower, images[order])[order.argsort()]

    def draw_order(self, count: int) -> Tensor:
        """Return the order (count,) of the images in the follower's groups: random, unless there is one group."""
        device = self.queue.device
        return torch.arange(count, device=device) if self.groups == 1 else torch.randperm(count, device=device)

    def _encode(self, encoder: nn.Module, images: Tensor) -> Tensor:
        if len(images) < 2 * self.groups and self.groups > 1:
            raise UsageError(
                f"Each of the {self.groups} groups needs at least two images, but the batch of this process has "
                f"{len(images)}; use fewer groups or a larger batch."
            )
        rows = torch.cat([encoder(part) for part in images.tensor_split(self.groups)])
        return F.normalize(rows.float(), dim=-1)

    @torch.no_grad()
    def follow(self) -> None:
        """Update the follower's weights. Its BatchNorm has statistics of its own."""
        for own, leading in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
            own.lerp_(leading, 1 - self.ema)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Replace the oldest rows of the queue by rows (b, d); a queue shorter than the batch gets its last rows."""
        size = len(self.queue)
        kept = keys[-size:]
        skipped = len(keys) - len(kept)
        places = (self.pointer + skipped + torch.arange(len(kept), device=keys.device)) % size
        self.queue[places] = kept.to(self.queue.dtype)
        self.pointer.copy_((self.pointer + len(keys)) % size)


def add_mlp(encoder: Any) -> None:
    """Add a hidden layer before the output of an encoder, as in MoCo v2 (arXiv 2003.04297)."""
    hidden = nn.Linear(encoder.penultimate, encoder.penultimate)
    encoder.output = nn.Sequential(hidden, nn.ReLU(inplace=True), encoder.output)
