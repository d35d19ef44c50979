"""Images with their channels first or last: told from the modules, read and written by every function alike."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse import backbones
from uncollapse.backbones.sites import from_sets, to_sets

PLAN = uc.Plan(baseline=0)


def timm_swin(width: int = 12) -> nn.Module:
    """A Swin of two stages; with a width of 8 its first images are (b, 8, 8, 8)."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "window_size": 4, "depths": (1, 1), "embed_dim": width, "num_heads": (2, 2)}
    model: nn.Module = timm.create_model("swin_tiny_patch4_window7_224", **sizes, num_classes=3)
    return model


def torchvision_swin(width: int = 12) -> nn.Module:
    pytest.importorskip("torchvision")
    swin: Any = importlib.import_module("torchvision.models.swin_transformer")
    sizes: dict[str, Any] = {"patch_size": [4, 4], "window_size": [4, 4], "depths": [1, 1], "num_heads": [2, 2]}
    model: nn.Module = swin.SwinTransformer(**sizes, embed_dim=width, num_classes=3)
    return model


class LastBlock(nn.Module):
    """A residual MLP on (b, h, w, d)."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.shrink(self.grow(self.norm(x)).relu())
        return x + added


class MixedBlock(nn.Module):
    """Convolves channels first, normalizes channels last; its images are channels first, or last."""

    def __init__(self, last: bool, width: int = 6) -> None:
        super().__init__()
        self.last, self.conv, self.norm = last, nn.Conv2d(width, width, 3, padding=1), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.permute(0, 3, 1, 2) if self.last else x).permute(0, 2, 3, 1)
        x = self.norm(x)
        return x if self.last else x.permute(0, 3, 1, 2)


class Gate(nn.Module):
    """Squeeze and excitation: its linear layers see means of images with channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.linear(x.mean((2, 3)))
        return x * gate[:, :, None, None]


class DenseBlock(nn.Module):
    """Channels of two convolutions side by side: 11, while an image of side 5 has the width of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.wide(x), self.narrow(x).reshape(len(x), 5, *x.shape[2:])], 1)


class Permute(nn.Module):
    """As in torchvision."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def by_hand(model: nn.Module, path: str, x: Tensor, last: bool) -> Tensor:
    """Return the output of a module as sets (b, n, d) in float64, by a plain hook."""
    found: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        model.eval()(x)
    handle.remove()
    image = found[0].double()
    return image.flatten(1, -2) if last else image.flatten(2).mT


def mean_cosine(sets: Tensor) -> float:
    unit, n = nn.functional.normalize(sets, dim=-1), sets.shape[1]
    return float(((unit @ unit.mT).sum((1, 2)) - n).div(n * (n - 1)).mean())


CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], bool]] = {
    "timm swin": (timm_swin, "layers.*", (3, 3, 32, 32), True),
    "timm swin, d = h = w": (lambda: timm_swin(8), "layers.*", (3, 3, 32, 32), True),
    "torchvision swin": (torchvision_swin, "features.*", (3, 3, 32, 32), True),
    "torchvision swin, d = h = w": (lambda: torchvision_swin(8), "features.*", (3, 3, 32, 32), True),
    "norm and linear": (lambda: nn.Sequential(LastBlock(), LastBlock()), "*", (3, 4, 5, 6), True),
    "norm and linear, d = h = w": (lambda: nn.Sequential(LastBlock(), LastBlock()), "*", (3, 6, 6, 6), True),
    "norm and linear, h = hidden": (lambda: nn.Sequential(LastBlock(), LastBlock()), "*", (3, 12, 4, 6), True),
    "video": (lambda: nn.Sequential(LastBlock(), LastBlock()), "*", (3, 2, 4, 5, 6), True),
    "activation after linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU()), "1", (3, 4, 4, 6), True),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU()), "*", (3, 3, 6, 6), False),
    "convolution of video": (lambda: nn.Sequential(nn.Conv3d(3, 6, 1), nn.ReLU()), "*", (3, 3, 2, 4, 6), False),
    "channels side by side": (lambda: nn.Sequential(DenseBlock()), "0", (3, 3, 4, 5), False),
    "permuted": (lambda: nn.Sequential(nn.Conv2d(3, 6, 1), Permute(0, 2, 3, 1)), "1", (3, 3, 6, 6), True),
    "mixed, channels last": (lambda: nn.Sequential(MixedBlock(True)), "0", (3, 4, 5, 6), True),
    "mixed, channels first": (lambda: nn.Sequential(MixedBlock(False)), "0", (3, 6, 4, 5), False),
}


@pytest.mark.parametrize("name", CASES)
def test_axes_come_from_the_modules(name: str) -> None:
    torch.manual_seed(0)
    build, pattern, shape, last = CASES[name]
    model, x = build(), images(*shape)
    diagnosis = uc.diagnose(model, [x], modules=pattern, plan=PLAN)
    layers = [layer for layer in diagnosis.layers if layer.name != "embed"]
    assert len(layers) == len(backbones.find(model, modules=pattern).blocks)
    for layer in layers:
        sets = by_hand(model, layer.name, x, last)
        assert (layer.dim, layer.tokens) == (sets.shape[-1], sets.shape[0] * sets.shape[1])
        assert layer["mean_cosine"] == pytest.approx(mean_cosine(sets), rel=1e-5, abs=1e-6)
        with uc.tokens(model, layer.name, modules=pattern) as t, torch.no_grad():
            model(x)
            torch.testing.assert_close(t[layer.name].double(), sets)


@pytest.mark.parametrize("name", CASES)
def test_cures_write_the_layout_back(name: str) -> None:
    torch.manual_seed(0)
    build, pattern, shape, last = CASES[name]
    model, x = build().eval(), images(*shape)
    before = model(x)

    def cure(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        sets = output.flatten(1, -2) if last else output.flatten(2).mT
        new = uc.contra_norm(sets, 0.5)
        return new.reshape(output.shape) if last else new.mT.reshape(output.shape)

    path = backbones.find(model, modules=pattern).blocks[-1].path
    handle = model.get_submodule(path).register_forward_hook(cure)
    expected = model(x)
    handle.remove()
    assert not torch.allclose(expected, before)
    with uc.attach(model, "contra_norm", scale=0.5, modules=pattern, layers="last", causal=False):
        torch.testing.assert_close(model(x), expected)
    assert torch.equal(model(x), before)


class Along(nn.Module):
    """Convolves sequences (b, d, n), and may normalize features last in between."""

    def __init__(self, norm: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.causal = nn.Conv1d(6, 6, 3), nn.LayerNorm(6) if norm else None, causal

    def forward(self, x: Tensor) -> Tensor:
        new: Tensor = self.conv(nn.functional.pad(x, (2, 0) if self.causal else (1, 1)))
        return x + (new if self.norm is None else self.norm(new.transpose(1, 2)).transpose(1, 2))


class Attends(nn.Module):
    """Attention as torch has it by default, with the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        new: Tensor = self.attention(x, x, x)[0]
        return x + new


class Swaps(Attends):
    """It takes the batch first, and swaps axes around its attention."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


def mixer() -> nn.Module:
    """Convolutions of an MLP-Mixer take the five tokens for channels."""
    return nn.Sequential(nn.LayerNorm(6), nn.Conv1d(5, 5, 1), nn.Linear(6, 6))


SEQUENCES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "convolution": (Along, (3, 6, 5), "channels_first"),
    "convolution, d = n": (Along, (3, 6, 6), "channels_first"),
    "convolution and norm": (lambda: Along(norm=True), (3, 6, 5), "channels_first"),
    "mixer": (mixer, (3, 5, 6), "tokens"),
    "attention, sequence first": (Attends, (5, 3, 6), "sequence_first"),
    "attention, swapped": (Swaps, (3, 5, 6), "tokens"),
    "torch's layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8), (5, 3, 6), "sequence_first"),
    "recurrent": (lambda: nn.GRU(6, 6), (5, 3, 6), "sequence_first"),
    "recurrent, batch first": (lambda: nn.GRU(6, 6, batch_first=True), (3, 5, 6), "tokens"),
}


class Twice(nn.Module):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(build() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


@pytest.mark.parametrize("name", SEQUENCES)
def test_axes_of_sequences_come_from_the_modules(name: str) -> None:
    torch.manual_seed(0)
    build, shape, layout = SEQUENCES[name]
    model, x = Twice(build).eval(), images(*shape)
    with torch.no_grad():
        last = model(x).double()
    sets = {"channels_first": last.mT, "sequence_first": last.transpose(0, 1), "tokens": last}[layout]
    layer = uc.diagnose(model, [x], modules="blocks.*", plan=PLAN).layers[-1]
    assert (layer.dim, layer.tokens) == (6, sets.shape[0] * sets.shape[1])
    assert layer["mean_cosine"] == pytest.approx(mean_cosine(sets), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_convolutions_over_earlier_steps_are_found_to_be_causal(causal: bool) -> None:
    torch.manual_seed(0)
    model, x = Twice(lambda: Along(causal=causal)).eval(), images(2, 6, 9)
    other = torch.cat([x[..., :-1], x[..., -1:] + 1], -1)
    with warnings.catch_warnings(record=True) as caught, uc.attach(model, "contra_norm", scale=0.5), torch.no_grad():
        warnings.simplefilter("always")
        moved = (model(x) - model(other))[..., :-1].abs().max()
    assert (float(moved) == 0) == causal
    assert any("found to be causal" in str(each.message) for each in caught) == causal


AMBIGUOUS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "d = h = w": (MixedBlock(True), (2, 6, 6, 6)),
    "parts without weights": (nn.Identity(), (2, 3, 4, 5)),
    "means": (Gate(), (2, 6, 6, 6)),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_image_is_an_error_with_both_readings(name: str) -> None:
    block, shape = AMBIGUOUS[name]
    model, x = nn.Sequential(block), images(*shape)
    words = rf"(?s)channels_first: {shape[1]} features.*channels_last: {shape[-1]} features.*layout="
    with pytest.raises(ValueError, match=words):
        uc.diagnose(model, [x], modules="0", plan=PLAN)
    with uc.attach(model, "contra_norm", scale=0.5, modules="0"), pytest.raises(ValueError, match=words):
        model(x)
    with uc.tokens(model, "last", modules="0") as t:
        model(x)
        with pytest.raises(ValueError, match=words):
            t["last"]


def test_the_argument_decides() -> None:
    model, x = nn.Sequential(MixedBlock(True)), images(3, 6, 6, 6)
    sets = {layout: by_hand(model, "0", x, layout == "channels_last") for layout in ("channels_first", "channels_last")}
    for layout, expected in sets.items():
        layer = uc.diagnose(model, [x], modules="0", layout=layout, plan=PLAN).layers[-1]  # type: ignore[arg-type]
        assert layer["mean_cosine"] == pytest.approx(mean_cosine(expected), rel=1e-5)
    assert abs(mean_cosine(sets["channels_first"]) - mean_cosine(sets["channels_last"])) > 1e-3


def test_timm_declares_what_its_modules_leave_open() -> None:
    model = nn.Sequential(MixedBlock(True))
    model.output_fmt = "NHWC"  # type: ignore[assignment]
    layer = uc.diagnose(model, [images(3, 6, 6, 6)], modules="0", plan=PLAN).layers[-1]
    sets = by_hand(model, "0", images(3, 6, 6, 6), last=True)
    assert layer["mean_cosine"] == pytest.approx(mean_cosine(sets), rel=1e-5)


def test_timm_lists_the_features_of_its_stages() -> None:
    """The stages of this model permute images around layers that need channels last."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "window_size": 4, "depths": (1, 1), "embed_dim": 12, "num_heads": (2, 2)}
    model, x = timm.create_model("swinv2_cr_tiny_224", **sizes, num_classes=3), images(3, 3, 32, 32)
    layers = uc.diagnose(model, [x], modules="stages.*", plan=PLAN).layers[1:]
    assert [layer.dim for layer in layers] == [12, 24]
    assert layers[1]["mean_cosine"] == pytest.approx(mean_cosine(by_hand(model, "stages.1", x, False)), rel=1e-5)


def test_a_permutation_has_two_sides() -> None:
    model, x = nn.Sequential(nn.Sequential(Permute(0, 2, 3, 1), LastBlock())), images(3, 6, 6, 6)
    embed = uc.diagnose(model, [x], modules="0", plan=PLAN).layers[0]
    assert embed["mean_cosine"] == pytest.approx(mean_cosine(x.double().flatten(2).mT), rel=1e-5)


def test_an_attached_cure_is_no_evidence() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6))), images(3, 6, 6, 6)
    uc.attach(model, "contra_norm", scale=0.5, modules="0.1", dim=6, after="layer")
    layer = uc.diagnose(model, [x], modules="0.1", plan=PLAN).layers[-1]
    assert layer["mean_cosine"] == pytest.approx(mean_cosine(by_hand(model, "0.1", x, last=False)), rel=1e-4)


def test_channels_last_and_back() -> None:
    x = images(2, 3, 4, 5)
    sets = to_sets(x, "channels_last")
    assert torch.equal(sets[1, 6], x[1, 1, 2])
    assert torch.equal(from_sets(sets, x, "channels_last"), x)
