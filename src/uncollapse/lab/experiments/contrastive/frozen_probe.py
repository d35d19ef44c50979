"""What a frozen encoder knows: a linear classifier and nearest neighbours on its features."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError, import_optional
from uncollapse.lab.engine.seeding import use_seed

Labelled = tuple[Tensor, Tensor]  # features (n, d) and labels (n,)
EPOCHS, BATCH, RATE, BETAS = 100, 128, 1e-3, (0.5, 0.999)  # of the paper's linear classifier
MILESTONES, DROP = (60, 80), 0.2  # epochs after which its learning rate falls, by this factor


def linear_probe(
    train: Labelled, judged: Mapping[str, Labelled], seed: int = 0, epochs: int = EPOCHS
) -> dict[str, float]:
    """Accuracies of a linear classifier with the paper's settings: Adam, 100 epochs, ×0.2 after 60 and 80 of them.

    Wang & Isola, arXiv 2005.10242. Where they augment the pictures anew in each epoch, features are given here.

    Args:
        train: features and labels to learn from.
        judged: those to judge by, by name.
        seed: of the weights and of the order.
        epochs: passes; the milestones move along.
    """
    features, labels = _check_features(train)
    classes = int(labels.max()) + 1
    with use_seed(seed), torch.enable_grad():
        head = nn.Linear(features.shape[1], classes).to(features.device)
        optimiser = torch.optim.Adam(head.parameters(), lr=RATE, betas=BETAS)
        falls = [at * epochs // EPOCHS for at in MILESTONES]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, falls, DROP)
        for _ in range(epochs):
            for chosen in torch.split(torch.randperm(len(labels)), BATCH):
                optimiser.zero_grad()
                torch.autograd.backward(F.cross_entropy(head(features[chosen]), labels[chosen]))
                optimiser.step()
            schedule.step()
    with torch.no_grad():
        return {name: _accuracy(head(x.float()).argmax(1) == y) for name, (x, y) in judged.items()}


def knn_probe(train: Labelled, judged: Mapping[str, Labelled], count: int = 5) -> dict[str, float]:
    """Accuracies of a vote of the nearest training rows, by Euclidean distance."""
    features, labels = _check_features(train)
    sklearn: Any = import_optional("sklearn.neighbors", "train")
    if len(labels) < count:
        raise UsageError(f"{count} neighbours need as many rows to look among, got {len(labels)}.")
    voters = sklearn.KNeighborsClassifier(count, algorithm="brute").fit(features.cpu().numpy(), labels.cpu().numpy())
    return {name: float(voters.score(x.float().cpu().numpy(), y.cpu().numpy())) for name, (x, y) in judged.items()}


def _check_features(train: Labelled) -> Labelled:
    features, labels = train[0].detach().float(), train[1]
    if not bool(features.isfinite().all()):
        raise NotFiniteError("The features of the encoder are not finite.")
    return features, labels


def _accuracy(right: Tensor) -> float:
    return float(right.float().mean())
