"""DiversePatch's three losses on a vision transformer in training (Gong et al. 2021, arXiv 2104.12753)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from uncollapse.attachment import inner_tokens
from uncollapse.errors import UsageError
from uncollapse.losses import patch_contrastive_loss, patch_cosine_loss, patch_mixing_loss

FORMS = ("paper", "others", "released")


class WithPatchHead(nn.Module):
    """A vision transformer in training, with the head that all patches share if the mixing loss needs one.

    The transformer itself is not changed: `vit` is evaluated, exported and saved.
    """

    def __init__(self, vit: Any, *, patch_head: bool, dropout: float) -> None:
        super().__init__()
        self.vit = vit
        self.patch_head: nn.Module | None = None
        if patch_head:
            linear = nn.Linear(vit.embed_dim, vit.num_classes)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            self.patch_head = nn.Sequential(nn.Dropout(dropout), linear)

    def forward(self, images: Tensor) -> Any:
        """Return logits (b, C) of images, or those of both heads during distillation."""
        return self.vit(images)


class PatchLosses:
    """The weighted sum of the losses on the model's last forward pass, while it is open.

    h are the patches after the last norm, or the input of the pooling in models whose last norm follows it. The
    contrastive loss compares them with e: "paper" takes the output of the first block, and the mean of all h; "others"
    leaves each patch out of its mean; "released" is the three-way contrast with the patch embeddings, before positions
    are added and without their gradient.

    Args:
        vit: The model that is trained.
        weights: Weights of "cosine", "contrast" and "mixing"; 0 leaves one out.
        absolute: Whether the cosine loss takes absolute values of cosines.
        form: Form of the contrastive loss.
    """

    def __init__(self, vit: Any, weights: Mapping[str, float], *, absolute: bool = False, form: str = "paper") -> None:
        self.vit, self.weights, self.absolute, self.form = vit, weights, absolute, form
        if weights["contrast"] and form != "paper" and vit.patch_embed.num_patches < 2:
            raise UsageError(
                f"contrast_form {form} needs at least two patches per image, got one; take smaller patches."
            )
        self.last = "last" if isinstance(vit.norm, nn.Identity) else "final"
        self.embedded: Tensor | None = None

    @contextmanager
    def open(self) -> Iterator["PatchLosses"]:
        """Read the activations while the model runs."""
        if not any(self.weights.values()):
            yield self
            return
        released = bool(self.weights["contrast"]) and self.form == "released"
        handle = self._hook() if released else None
        try:
            with inner_tokens.tokens(self.vit, ("first", self.last)) as self.held:
                yield self
        finally:
            self.embedded = None
            if handle is not None:
                handle.remove()

    def _hook(self) -> RemovableHandle:
        watched = self.vit.patch_embed

        def store(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            if module is watched:  # not a copy, such as one of averaged weights, which has the same hook
                self.embedded = output.flatten(1, -2)  # (b, n, d); models for any image size give rows and columns

        handle: RemovableHandle = watched.register_forward_hook(store)
        return handle

    def __call__(self, patch_head: nn.Module | None, labels: Tensor | None) -> Tensor:
        """Return the loss of the last forward pass. labels (b, n, C): labels of the patches, for the mixing loss."""
        if not any(self.weights.values()):
            return torch.zeros(())
        h = self.held[self.last].float()
        total = h.new_zeros(())
        if self.weights["cosine"]:
            total = total + self.weights["cosine"] * patch_cosine_loss(h, absolute=self.absolute)
        if self.weights["contrast"]:
            total = total + self.weights["contrast"] * self._contrast(h)
        if self.weights["mixing"]:
            assert patch_head is not None
            assert labels is not None
            total = total + self.weights["mixing"] * patch_mixing_loss(patch_head(h), labels)
        return total

    def _contrast(self, h: Tensor) -> Tensor:
        if self.form == "released":
            assert self.embedded is not None
            return patch_contrastive_loss(
                self.embedded.float(), h, negative="three_way", detach=True, grid=self.vit.patch_embed.grid_size
            )
        return patch_contrastive_loss(
            self.held["first"].float(), h, negative="all" if self.form == "paper" else "others"
        )
