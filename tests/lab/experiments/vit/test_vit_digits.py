"""The vision transformer on digits: split, norms, training, record."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from uncollapse import ContraNorm
from uncollapse.backbones import torchvision_ops
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.vit import digits

torchvision_ops.declare()  # before timm
for library in ("sklearn", "timm"):
    pytest.importorskip(library)
TINY = digits.Config(depth=2, dim=16, heads=2, epochs=2, batch=200, lr=1e-2)


def features(config: digits.Config, images: torch.Tensor) -> torch.Tensor:
    """Tokens after the last norm; the head starts at zero."""
    found: torch.Tensor = digits.build(config).forward_features(images)  # type: ignore[operator]
    return found


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters()]


def test_every_image_is_in_one_part() -> None:
    parts = digits.digits()
    assert {name: len(labels) for name, (_, labels) in parts.items()} == digits.SIZES
    rows = torch.cat([images.flatten(1) for images, _ in parts.values()])
    assert rows.shape == (1797, 64)
    assert len(rows.unique(dim=0)) > 1790  # a few images are the same in the data itself
    for _, labels in parts.values():
        assert set(labels.tolist()) == set(range(10))


def test_images_are_standardised_by_those_for_training() -> None:
    images, _ = digits.digits()["train"]
    assert images.shape == (1197, 1, 8, 8)
    assert float(images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(images.std()) == pytest.approx(1, abs=1e-5)


def test_contra_norm_stands_in_front_of_every_layer_norm() -> None:
    plain, mended = (digits.build(replace(TINY, norm=norm, scale=0.3)) for norm in ("layer", "contra"))
    places = [name for name, module in plain.named_modules() if isinstance(module, nn.LayerNorm)]
    assert places == ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"]
    assert [name for name, module in mended.named_modules() if isinstance(module, nn.LayerNorm)] == places
    found = {name: module for name, module in mended.named_modules() if isinstance(module, ContraNorm)}
    assert list(found) == [f"{place}.uncollapse.contra_norm" for place in places]
    assert all(cure.fixed_scale == 0.3 and cure.norm is None for cure in found.values())


def test_both_norms_start_from_the_same_weights() -> None:
    plain, mended = (parameters(digits.build(replace(TINY, norm=norm))) for norm in ("layer", "contra"))
    assert all(torch.equal(a, b) for a, b in zip(plain, mended, strict=True))
    other = parameters(digits.build(replace(TINY, seed=1)))
    assert not all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_scale_zero_is_layer_norm() -> None:
    images = digits.digits()["test"][0][:5]
    plain = features(replace(TINY, norm="layer"), images)
    assert torch.equal(features(replace(TINY, scale=0.0), images), plain)
    assert not torch.allclose(features(TINY, images), plain, atol=1e-2)


def test_an_image_does_not_change_with_its_batch() -> None:
    images = digits.digits()["test"][0][:6]
    torch.testing.assert_close(features(TINY, images)[:2], features(TINY, images[:2]))


def test_unknown_norm_is_an_error() -> None:
    with pytest.raises(ValueError, match="contra"):
        digits.run(replace(TINY, norm="batch"))


@pytest.mark.parametrize("norm", digits.NORMS)
def test_it_learns(norm: str) -> None:
    steps: list[int] = []
    runtime = Runtime(progress=lambda done, total, figures: steps.append(done))
    model, record = digits.train(replace(TINY, norm=norm, epochs=8), runtime)
    assert steps == list(range(1, 8 * 6 + 1))
    assert not model.training
    assert [e["epoch"] for e in record["epochs"]] == list(range(1, 9))
    assert record["epochs"][-1]["loss"] < 0.7 * record["epochs"][0]["loss"]
    assert record["figures"]["test"] > 0.4
    assert record["figures"]["test"] == digits.accuracy(model, *digits.digits()["test"])


def test_the_seed_decides_and_the_random_state_stays() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    (one, record), (two, again) = digits.train(TINY), digits.train(TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(parameters(one), parameters(two), strict=True))
    assert record["epochs"] == again["epochs"]
    assert digits.run(replace(TINY, seed=1))["epochs"] != record["epochs"]


def test_the_record_is_json_and_says_how_to_repeat_it() -> None:
    record = digits.run(replace(TINY, epochs=1))
    assert json.loads(json.dumps(record)) == record
    assert digits.Config(**record["config"]) == replace(TINY, epochs=1)
    assert (record["recipe"], record["seed"]) == ("vit-digits", 0)
    assert record["versions"].keys() == {"python", "torch", "uncollapse", "timm", "scikit-learn", "accelerate"}
    assert record["seconds"] > 0
