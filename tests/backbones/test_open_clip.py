"""The towers of open_clip: both are measured, without padding and class token, and a cure keeps texts causal."""

from typing import Any

import pytest
import torch
from torch import Tensor

import uncollapse as uc
from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
open_clip = pytest.importorskip("open_clip")

IMAGES = {"image_size": 16, "layers": 2, "width": 16, "patch_size": 8, "head_width": 8}
TEXTS = {"context_length": 9, "vocab_size": 40, "width": 16, "heads": 2, "layers": 2}
END = 39
PLAN = uc.Plan(baseline=0, rank_samples=8)


def two_towers(name: str = "CLIP", **texts: Any) -> Any:
    torch.manual_seed(0)
    return getattr(open_clip, name)(8, vision_cfg=IMAGES, text_cfg={**TEXTS, **texts}).eval()


def batch(lengths: tuple[int, ...] = (4, 9, 6)) -> dict[str, Tensor]:
    """Texts that end after `lengths` tokens, with 0 as padding."""
    torch.manual_seed(1)
    text = torch.randint(1, END, (len(lengths), 9))
    for row, length in zip(text, lengths, strict=True):
        row[length - 1], row[length:] = END, 0
    return {"image": torch.randn(len(lengths), 3, 16, 16), "text": text}


@pytest.mark.parametrize(("name", "text"), [("CLIP", "transformer"), ("CustomTextCLIP", "text.transformer")])
def test_both_towers_are_measured_without_padding_and_class_token(name: str, text: str) -> None:
    d = uc.diagnose(two_towers(name), [batch()], plan=PLAN)
    parts = {part.settings["part"]: part for part in (d, *d.others)}
    assert list(parts) == ["visual.transformer", text]
    assert {layer.tokens for layer in parts["visual.transformer"].layers} == {3 * 4}
    assert {layer.tokens for layer in parts[text].layers} == {4 + 9 + 6}
    assert [layer.name for layer in parts[text].layers] == ["embed", "block 0", "block 1", "final"]


def test_padding_that_the_model_looks_at_is_measured() -> None:
    d = uc.diagnose(two_towers("CustomTextCLIP", no_causal_mask=True, pool_type="last"), [batch()], plan=PLAN)
    assert {layer.tokens for layer in d.others[0].layers} == {3 * 9}


@pytest.mark.parametrize("place", ["block", "attention.residual", "attention.output", "mlp.norm"])
def test_a_cure_of_texts_is_causal(place: str) -> None:
    model, given = two_towers(), batch((9,))
    plain = hidden(model, given)
    with uc.attach(model, "contra_norm", scale=0.5, at=place, part="transformer"):
        cured = hidden(model, given)
        other = given["text"].clone()
        other[:, -2] = other[:, -2] % 30 + 1
        torch.testing.assert_close(hidden(model, {**given, "text": other})[:, :-2], cured[:, :-2])
    assert not torch.allclose(plain, cured)
    assert torch.equal(hidden(model, given), plain)


def test_attach_asks_for_a_tower() -> None:
    with pytest.raises(ValueError, match=r"part='visual\.transformer'"):
        uc.attach(two_towers(), "contra_norm", scale=0.1)


def hidden(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Return the last tokens of the text tower."""
    with torch.no_grad(), uc.tokens(model, layers=["last"], part="transformer") as seen:
        model(**given)
        return seen["last"].clone()
