"""Accuracy of a linear classifier and of nearest neighbours on the features of a frozen encoder."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError, import_optional
from uncollapse.lab.engine.seeding import use_seed

Labelled = tuple[Tensor, Tensor]  # features (n, d) and labels (n,)
EPOCHS, BATCH, RATE, BETAS = 100, 128, 1e-3, (0.5, 0.999)  # of the paper's linear classifier
MILESTONES, DROP = (60, 80), 0.2  # epochs after which its learning rate is multiplied by this factor


def linear_probe(
    train: Labelled, evaluated: Mapping[str, Labelled], seed: int = 0, epochs: int = EPOCHS
) -> dict[str, float]:
    """Return accuracies of a linear classifier trained as in the paper: Adam, 100 epochs, ×0.2 after 60 and 80.

    Wang & Isola (arXiv 2005.10242) augment the images in each epoch; here the features are fixed.

    Args:
        train: Training features and labels.
        evaluated: Features and labels to evaluate on, by name.
        seed: Seed of the weights and of the order.
        epochs: Number of epochs; the milestones scale with it.
    """
    features, labels = _check_features(train)
    classes = int(labels.max()) + 1
    with use_seed(seed), torch.enable_grad():
        head = nn.Linear(features.shape[1], classes).to(features.device)
        optimizer = torch.optim.Adam(head.parameters(), lr=RATE, betas=BETAS)
        milestones = [at * epochs // EPOCHS for at in MILESTONES]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, DROP)
        for _ in range(epochs):
            for chosen in torch.split(torch.randperm(len(labels)), BATCH):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(head(features[chosen]), labels[chosen]))
                optimizer.step()
            schedule.step()
    with torch.no_grad():
        return {name: _accuracy(head(x.float()).argmax(1) == y) for name, (x, y) in evaluated.items()}


def knn_probe(train: Labelled, evaluated: Mapping[str, Labelled], count: int = 5) -> dict[str, float]:
    """Return accuracies of the majority vote of the nearest training rows, by Euclidean distance."""
    features, labels = _check_features(train)
    sklearn: Any = import_optional("sklearn.neighbors", "train")
    if len(labels) < count:
        raise UsageError(f"{count} neighbours need at least {count} training rows, got {len(labels)}.")
    voters = sklearn.KNeighborsClassifier(count, algorithm="brute").fit(features.cpu().numpy(), labels.cpu().numpy())
    return {name: float(voters.score(x.float().cpu().numpy(), y.cpu().numpy())) for name, (x, y) in evaluated.items()}


def _check_features(train: Labelled) -> Labelled:
    features, labels = train[0].detach().float(), train[1]
    if not bool(features.isfinite().all()):
        raise NotFiniteError("The features of the encoder are not finite.")
    return features, labels


def _accuracy(correct: Tensor) -> float:
    return float(correct.float().mean())
