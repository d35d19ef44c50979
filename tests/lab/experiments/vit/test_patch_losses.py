"""DiversePatch's losses in a model that trains: the same as by hand, with the right gradients and nothing left over."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from tests.lab.experiments.vit.tiny_vision import CLASSES, KINDS, images, tiny_vit
from torch import Tensor, nn

from uncollapse.errors import UsageError
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.vit.patch_losses import FORMS, PatchLosses, WithPatchHead
from uncollapse.lab.experiments.vit.soft_labels import patch_mixer
from uncollapse.losses import patch_contrastive_loss, patch_cosine_loss, patch_mixing_loss

NONE = {"cosine": 0.0, "contrast": 0.0, "mixing": 0.0}
ALL = {"cosine": 0.5, "contrast": 2.0, "mixing": 3.0}


def by_hand(vit: Any, x: Tensor) -> dict[str, Tensor]:
    """Patches of the last layer, those that leave the first block, and their embeddings."""
    embedded = vit.patch_embed(x)
    first = vit.blocks[0](vit.norm_pre(vit._pos_embed(embedded)))[:, vit.num_prefix_tokens :]
    return {"h": vit.forward_features(x)[:, vit.num_prefix_tokens :], "first": first, "embedded": embedded}


def contrast(tokens: dict[str, Tensor], form: str, grid: tuple[int, int]) -> Tensor:
    if form == "released":
        return patch_contrastive_loss(tokens["embedded"], tokens["h"], negative="three_way", detach=True, grid=grid)
    return patch_contrastive_loss(tokens["first"], tokens["h"], negative="all" if form == "paper" else "others")


def patch_labels(patches: int = 16) -> Tensor:
    return torch.rand(4, patches, len(CLASSES), generator=torch.Generator().manual_seed(1)).softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("absolute", [False, True])
def test_every_loss_by_hand(kind: str, form: str, absolute: bool) -> None:
    vit = tiny_vit(**KINDS[kind])
    model = WithPatchHead(vit, patch_head=True, dropout=0.0)
    tokens = by_hand(vit, images())
    assert model.patch_head is not None
    expected = {
        "cosine": patch_cosine_loss(tokens["h"], absolute=absolute),
        "contrast": contrast(tokens, form, (4, 4)),
        "mixing": patch_mixing_loss(model.patch_head(tokens["h"]), patch_labels()),
    }
    for name in expected:
        assert abs(expected[name].item()) > 1e-3
        with PatchLosses(vit, NONE | {name: 1.0}, absolute=absolute, form=form).open() as losses:
            model(images())
            torch.testing.assert_close(losses(model.patch_head, patch_labels()), expected[name])
    with PatchLosses(vit, ALL, absolute=absolute, form=form).open() as losses:
        model(images())
        found = losses(model.patch_head, patch_labels())
    torch.testing.assert_close(found, sum(ALL[name] * expected[name] for name in ALL))


@pytest.mark.parametrize("form", FORMS)
def test_grids_that_are_not_square(form: str) -> None:
    vit = tiny_vit(img_size=(16, 40))
    x = torch.randn(2, 3, 16, 40, generator=torch.Generator().manual_seed(0))
    assert vit.patch_embed.grid_size == (2, 5)
    with PatchLosses(vit, NONE | {"contrast": 1.0}, form=form).open() as losses:
        vit(x)
        torch.testing.assert_close(losses(None, None), contrast(by_hand(vit, x), form, (2, 5)))


def test_models_for_images_of_any_size() -> None:
    vit, plain = tiny_vit(dynamic_img_size=True), tiny_vit()
    found = []
    for model in (vit, plain):
        with PatchLosses(model, NONE | {"contrast": 1.0}, form="released").open() as losses:
            model(images())
            found.append(losses(None, None))
    torch.testing.assert_close(*found)


def gradient(form: str, weights: dict[str, float]) -> Any:
    vit = tiny_vit()
    model = WithPatchHead(vit, patch_head=True, dropout=0.0)
    with PatchLosses(vit, weights, form=form).open() as losses:
        model(images())
        losses(model.patch_head, patch_labels()).backward()
    return model


def test_gradients_reach_what_they_should() -> None:
    """The released form learns nothing through e; the paper's does."""
    tokens: dict[str, Tensor] = {}
    for form in ("paper", "released"):
        found = gradient(form, NONE | {"contrast": 1.0}).vit
        vit = tiny_vit()
        tokens = by_hand(vit, images())
        frozen = {name: tensor.detach() if name != "h" else tensor for name, tensor in tokens.items()}
        contrast(frozen, form, (4, 4)).backward()
        own, without = found.patch_embed.proj.weight.grad, vit.patch_embed.proj.weight.grad
        if form == "released":
            torch.testing.assert_close(own, without)
        else:
            assert float((own - without).abs().max()) > 1e-4
        assert float(found.blocks[1].mlp.fc1.weight.grad.abs().max()) > 0
        assert found.head.weight.grad is None


def test_the_patch_head_learns_from_mixing_alone() -> None:
    model = gradient("paper", NONE | {"mixing": 1.0})
    assert float(model.patch_head[1].weight.grad.abs().max()) > 0
    assert float(model.vit.norm.weight.grad.abs().max()) > 0
    model = gradient("paper", NONE | {"cosine": 1.0})
    assert model.patch_head[1].weight.grad is None


def test_a_head_only_where_it_is_needed_and_no_part_of_the_transformer() -> None:
    vit = tiny_vit()
    names = set(vit.state_dict())
    with use_seed(0):
        model = WithPatchHead(vit, patch_head=True, dropout=0.3)
    head: Any = model.patch_head
    assert head[0].p == 0.3
    assert head[1].weight.shape == (5, 24)
    assert float(head[1].weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert not head[1].bias.any()
    assert set(model.vit.state_dict()) == names
    assert WithPatchHead(vit, patch_head=False, dropout=0.3).patch_head is None
    assert torch.equal(model(images()), vit(images()))


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_go_also_when_training_breaks_off() -> None:
    vit = tiny_vit()
    with PatchLosses(vit, ALL, form="released").open():
        assert hooks(vit) > 0
    assert hooks(vit) == 0
    with pytest.raises(RuntimeError, match="broke"), PatchLosses(vit, ALL, form="released").open():
        raise RuntimeError("broke")
    assert hooks(vit) == 0
    with PatchLosses(vit, NONE, form="released").open() as losses:
        assert hooks(vit) == 0
        assert float(losses(None, None)) == 0


def test_nothing_stays_in_memory() -> None:
    vit = tiny_vit()
    model, losses = WithPatchHead(vit, patch_head=True, dropout=0.0), PatchLosses(vit, ALL, form="released")
    seen: list[weakref.ref[Tensor]] = []
    for part in (vit.patch_embed, vit.blocks[0], vit.norm):
        part.register_forward_hook(lambda module, given, output: seen.append(weakref.ref(output)))
    with losses.open():
        model(images())
        losses(model.patch_head, patch_labels()).backward()
        assert all(reference() is not None for reference in seen)
    gc.collect()
    assert [reference() for reference in seen] == [None, None, None]


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_of_the_model_does_not_disturb_the_losses(form: str) -> None:
    """As that of averaged weights, which is made and judged while the losses read along."""
    vit = tiny_vit()
    model = WithPatchHead(vit, patch_head=True, dropout=0.0)
    with PatchLosses(vit, ALL, form=form).open() as losses:
        model(images())
        expected = losses(model.patch_head, patch_labels()).detach()
        average = torch.optim.swa_utils.AveragedModel(model)
        twin = copy.deepcopy(model)
        for other in (average.module, twin):
            with torch.no_grad():
                other.vit(images(seed=7))
        assert torch.equal(losses(model.patch_head, patch_labels()).detach(), expected)
        average.update_parameters(model)
    with torch.no_grad():
        assert torch.equal(average.module(images()), model(images()))
    with PatchLosses(twin.vit, ALL, form=form).open() as of_twin:
        twin(images())
        torch.testing.assert_close(of_twin(twin.patch_head, patch_labels()).detach(), expected)


def test_each_forward_pass_replaces_the_last_one() -> None:
    vit = tiny_vit()
    with PatchLosses(vit, NONE | {"contrast": 1.0}, form="released").open() as losses:
        vit(images(seed=3))
        vit(images())
        torch.testing.assert_close(losses(None, None), contrast(by_hand(tiny_vit(), images()), "released", (4, 4)))


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_computed_in_float32(form: str) -> None:
    vit = tiny_vit()
    model = WithPatchHead(vit, patch_head=True, dropout=0.0)
    with PatchLosses(vit, ALL, form=form).open() as losses, torch.autocast("cpu", torch.bfloat16):
        model(images())
        found = losses(model.patch_head, patch_labels())
    with PatchLosses(vit, ALL, form=form).open() as losses:
        model(images())
        expected = losses(model.patch_head, patch_labels())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    found.backward()
    assert all(bool(p.grad.isfinite().all()) for p in vit.parameters() if p.grad is not None)


def test_labels_of_mixed_patches_fit() -> None:
    vit = tiny_vit()
    model = WithPatchHead(vit, patch_head=True, dropout=0.0)
    with use_seed(0):
        mixed = patch_mixer(5, vit.patch_embed.patch_size, cutmix=1.0, chance=1.0, smoothing=0.1)(
            images(), torch.arange(4)
        )
    with PatchLosses(vit, NONE | {"mixing": 1.0}).open() as losses:
        model(mixed.images)
        assert losses(model.patch_head, mixed.patches).item() > 0


def test_an_image_of_one_patch_has_no_others() -> None:
    vit = tiny_vit(patch_size=32)
    for form in ("others", "released"):
        with pytest.raises(UsageError, match=form):
            PatchLosses(vit, ALL, form=form)
    with PatchLosses(vit, NONE | {"cosine": 1.0, "contrast": 1.0}).open() as losses:
        vit(images())
        torch.testing.assert_close(losses(None, None), torch.tensor(2.0).log())  # h is its own mean
