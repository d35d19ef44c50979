"""Train vision transformers with and without ContraNorm and DiversePatch, and
compare the cosines of their patches.

    python examples/vision.py              # scikit-learn's digits
    python examples/vision.py FOLDER       # train/CLASS/*.jpg, val/CLASS/*.jpg

Two models are trained by the recipe `vit`, and one in a plain loop, as you
would do it with your own model. The models and the data are small: they show
how it works, but are no comparison of cures.
"""

import argparse
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
    """Train a model from timm with ContraNorm, and with DiversePatch's losses on its patches."""
    torchvision_ops.declare()  # timm needs this if torchvision was built for another torch
    import timm

    torch.manual_seed(config.seed)
    classes = len(data.set.train.classes)
    sizes: dict[str, Any] = {"depth": config.depth, "embed_dim": config.width}
    sizes |= {"img_size": config.image, "patch_size": config.patch}
    model: nn.Module = timm.create_model("deit_tiny_patch16_224", num_classes=classes, **sizes)
    uc.attach(model, "contra_norm", scale=0.2, at="norms", tokens="all")
    head = nn.Linear(config.width, classes)  # one for all patches, only used in training
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=config.lr)
    with uc.tokens(model, layers=("first", "final")) as t:
        for batch in batches(data, model, config):  # your data loader
            mix = uc.cutmix_patches(batch.images, batch.labels, config.patch, num_classes=classes)
            loss = F.cross_entropy(model(mix.images), mix.labels.mean(1))
            loss = loss + uc.patch_cosine_loss(t["final"]) + uc.patch_contrastive_loss(t["first"], t["final"])
            loss = loss + uc.patch_mixing_loss(head(t["final"]), mix.labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    return model.eval()


def batches(data: vision.Data, model: nn.Module, config: vit.Config, part: str = "train") -> ImageBatches:
    """Return the images of all training epochs, or of another split once, prepared for a model."""
    images, epochs = data.parts[part], config.epochs if part == "train" else 1
    order = [at for epoch in range(epochs) for at in epoch_order(len(images), epoch)]
    return ImageBatches(images, order, config.batch, evaluation_transform(input_spec(model), crop="padded"))


def main() -> None:
    """Train three models, and print the mean cosine of their patches by block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="images; without it, digits")
    folder = parser.parse_args().folder
    if folder is not None and not (folder / "train").is_dir():
        parser.error(f"{folder} must be a folder with train/CLASS/*.jpg and val/CLASS/*.jpg.")
    runtime = Runtime(folder)
    where = {"data": ".", "examples": 0} if runtime.data_root else {"data": "digits", "examples": 400}  # 0: all of them
    plain, cured = (vit.Config(**{**way, **where}) for way in (PLAIN, CURED))
    data = vision.load(plain, runtime)
    models = {"no cure": vit.train(plain, runtime)[0], "ContraNorm": vit.train(cured, runtime)[0]}
    models["ContraNorm and DiversePatch"] = own_loop(data, plain)
    table, columns = Table("", *models, title="Mean cosine of the patches of an image"), []
    for model in models.values():
        tests = [batch.images for batch in batches(data, model, plain, "test")]
        columns.append(uc.diagnose(model, tests[:4], plan=uc.Plan(baseline=0)).layers)
    for layers in zip(*columns, strict=True):
        table.add_row(layers[0].name, *(f"{layer['mean_cosine']:.3f}" for layer in layers))
    Console().print(table)


if __name__ == "__main__":
    main()
