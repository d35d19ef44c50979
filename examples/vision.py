"""Train vision transformers with and without ContraNorm and DiversePatch, and see how alike their patches grow.

    python examples/vision.py              # scikit-learn's digits
    python examples/vision.py FOLDER       # FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg

Two models are trained by the recipe `vit`, which does all of it; one by a loop of its own, as you would do it with a
model and a loop that you have. They are small and see little: enough to see how it is done, not to compare cures.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.lab.data.image.augmentation import evaluation_transform
from uncollapse.lab.data.image.image_batches import ImageBatches, epoch_order
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit import recipe as vit
from uncollapse.lab.experiments.vit.training import input_spec

SIZES = {"depth": 6, "width": 48, "image": 16, "patch": 4, "epochs": 3}
PLAIN: dict[str, Any] = {**vit.RECIPE.presets["small"], **SIZES, "cure": "none", "precision": "no"}
CURED: dict[str, Any] = {**PLAIN, "cure": "contra_norm"}


def own_loop(data: vision.Data, config: vit.Config) -> nn.Module:
    """A model of timm with ContraNorm in it, and DiversePatch's losses on its patches."""
    torchvision_ops.declare()  # where torchvision was built for another torch, timm needs it
    import timm

    torch.manual_seed(config.seed)
    classes = len(data.set.train.classes)
    sizes: dict[str, Any] = {"depth": config.depth, "embed_dim": config.width}
    sizes |= {"img_size": config.image, "patch_size": config.patch}
    model: nn.Module = timm.create_model("deit_tiny_patch16_224", num_classes=classes, **sizes)
    uc.attach(model, "contra_norm", scale=0.2, at="norms", tokens="all")
    head = nn.Linear(config.width, classes)  # one for all patches, and for training only
    optimiser = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=config.lr)
    with uc.tokens(model, layers=("first", "final")) as t:
        for batch in batches(data, model, config):  # your data loader
            mix = uc.cutmix_patches(batch.images, batch.labels, config.patch, num_classes=classes)
            loss = F.cross_entropy(model(mix.images), mix.labels.mean(1))
            loss = loss + uc.patch_cosine_loss(t["final"]) + uc.patch_contrastive_loss(t["first"], t["final"])
            loss = loss + uc.patch_mixing_loss(head(t["final"]), mix.labels)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
    return model.eval()


def batches(data: vision.Data, model: nn.Module, config: vit.Config, part: str = "train") -> ImageBatches:
    """The pictures of all epochs, or of the test, as a model wants them."""
    pictures, epochs = data.parts[part], config.epochs if part == "train" else 1
    order = [at for epoch in range(epochs) for at in epoch_order(len(pictures), epoch)]
    return ImageBatches(pictures, order, config.batch, evaluation_transform(input_spec(model), crop="padded"))


def main() -> None:
    """Train three models, and print the similarity of their patches by block."""
    runtime = Runtime(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    where = {"data": ".", "examples": 0} if runtime.data_root else {"data": "digits", "examples": 400}  # 0: all of them
    plain, cured = (vit.Config(**{**way, **where}) for way in (PLAIN, CURED))
    data = vision.load(plain, runtime)
    models = {"recipe, none": vit.train(plain, runtime)[0], "recipe, ContraNorm": vit.train(cured, runtime)[0]}
    models["own loop, both"] = own_loop(data, plain)
    table, columns = Table("", *models, title="Mean cosine of the patches of an image"), []
    for model in models.values():
        tests = [batch.images for batch in batches(data, model, plain, "test")]
        columns.append(uc.diagnose(model, tests[:4], plan=uc.Plan(baseline=0)).layers)
    for layers in zip(*columns, strict=True):
        table.add_row(layers[0].name, *(f"{layer['mean_cosine']:.3f}" for layer in layers))
    Console().print(table)


if __name__ == "__main__":
    main()
