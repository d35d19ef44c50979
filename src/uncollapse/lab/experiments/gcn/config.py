"""Configuration, graph and model of the recipe `gcn-depth`."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, reset_idle
from uncollapse.lab.data.graph import datasets, splits
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.models import deep_gcn
from uncollapse.lab.models.deep_gcn import GCNII, DeepGCN

SHARE: dict[str, Any] = {"minimum": 0, "maximum": 1}
BUILT_IN = (*datasets.DRAWN, "karate")  # graphs without files
CONTRA_NORMS = ("contra_norm", "contra_norm_features")


@dataclass(frozen=True)
class Config:
    """Configuration of a run. The defaults are those of the published code, except for the graph, which is random."""

    data: str = config_field("csbm", "The graph.", choices=datasets.NAMES)
    split: str = config_field(
        "published", "How nodes are split into training, validation and test.", choices=splits.SPLITS
    )
    split_index: int = config_field(0, "Number of the split.", minimum=0, maximum=2**31)
    normalise: str = config_field("auto", "Normalization of the features.", choices=datasets.NORMALISATIONS)
    missing: float = config_field(
        0.0, "Share of the validation and test nodes whose features are set to zero.", **SHARE
    )
    self_loops: str = config_field(
        "published",
        "Self-loops of Chameleon and Squirrel: published adds them to each node's own, none drops them.",
        choices=datasets.SELF_LOOPS,
    )
    nodes: int = config_field(600, "Random graphs: number of nodes.", minimum=180)
    degree: float = config_field(8.0, "Random graphs: mean degree.", minimum=0)
    homophily: float = config_field(0.7, "Random graphs: share of the edges within a class.", **SHARE)
    model: str = config_field(
        "gcn", "gcn: as published; gcnii: initial residual and identity mapping.", choices=("gcn", "gcnii")
    )
    layers: int = config_field(16, "Number of graph convolutions.", minimum=1)
    hidden: int = config_field(32, "Width of the hidden layers.", minimum=1)
    norm: str = config_field("contra_norm", "The norm after a hidden layer.", choices=tuple(deep_gcn.NORMS))
    scale: float = config_field(1.0, "Scale of ContraNorm or PairNorm.")
    identity: bool = config_field(
        True, "ContraNorm: (1 + s)x − s·m, Eq. 8 and the released code; without it x − s·m, Eq. 9 of the paper."
    )
    after: str = config_field("layer", "What follows ContraNorm.", choices=("layer", "none"))
    norm_every: int = config_field(1, "Layers from one norm to the next.", minimum=1)
    sample: int = config_field(0, "Random nodes that ContraNorm compares with in training; 0: all.", minimum=0)
    residual: int = config_field(0, "gcn: layers from one residual to the next; 0: none.", minimum=0)
    alpha: float = config_field(0.1, "gcnii: share of the first layer's output in each layer.", **SHARE)
    theta: float = config_field(0.5, "gcnii: strength of the weights; 0: no identity mapping.", minimum=0)
    init: Literal["published", "glorot"] = config_field("published", "gcn: initialization of the weights.")
    drop_edge: float = config_field(0.0, "Share of the edges that are dropped in a step.", **SHARE)
    uniform: float = config_field(0.0, "Weight of the uniformity loss on the last hidden layer.")
    dropout: float = config_field(0.6, "Dropout before each layer.", **SHARE)
    lr: float = config_field(5e-3, "Learning rate of Adam.", minimum=0)
    weight_decay: float = config_field(5e-4, "L2 penalty of all weights.", minimum=0)
    conv_decay: float | None = config_field(None, "L2 penalty of the convolutions, if different.", minimum=0)
    epochs: int = config_field(200, "Largest number of epochs.", minimum=1)
    select: str = config_field(
        "last",
        "Which weights are tested: the last epoch's, or the best on validation.",
        choices=("last", "accuracy", "loss"),
    )
    patience: int = config_field(
        0, "Epochs without improvement on validation after which training stops; 0: never.", minimum=0
    )
    seed: int = config_field(0, "Seed of weights and dropout.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        if self.sample and self.norm == "contra_norm_features":
            raise UsageError("sample needs norm contra_norm: contra_norm_features does not compare nodes.")
        if self.patience and self.select == "last":
            raise UsageError("patience needs select accuracy or loss, got last.")
        hidden = self.layers if self.model == "gcnii" else self.layers - 1
        if self.norm != "none" and self.norm_every > max(1, hidden):
            raise UsageError(
                f"norm_every must be at most {hidden}, the number of hidden layers, got {self.norm_every}."
            )
        reset_idle(self, [] if self.norm in CONTRA_NORMS else ["identity"])
        reset_idle(self, [] if self.data in datasets.WITH_SELF_LOOPS else ["self_loops"])


def build(config: Config, graph: datasets.Graph) -> nn.Module:
    """Return the model before training."""
    width, shapes = config.hidden, (graph.x.shape[1], graph.classes)
    options: dict[str, Any] = {
        "scale": config.scale,
        "identity": config.identity,
        "after": config.after,
        "sample": config.sample,
    }
    shared: dict[str, Any] = {
        "layers": config.layers,
        "hidden": width,
        "dropout": config.dropout,
        "drop_edge": config.drop_edge,
    }
    if config.model == "gcnii":

        def norm_of(number: int) -> deep_gcn.Norm | None:
            wanted = config.norm != "none" and (number + 1) % config.norm_every == 0
            return deep_gcn.build_norm(config.norm, width, **options) if wanted else None

        return GCNII(*shapes, alpha=config.alpha, theta=config.theta, norms=norm_of, **shared)
    count = config.layers - 1 if config.norm in deep_gcn.PER_LAYER_NORMS else 1
    own = [deep_gcn.build_norm(config.norm, width, **options) for _ in range(max(1, count))]
    return DeepGCN(
        *shapes, norms=own, norm_every=config.norm_every, residual=config.residual, init=config.init, **shared
    )


def load(config: Config, runtime: Runtime) -> datasets.Graph:
    """Load the graph of a run."""
    return datasets.load_graph(
        config.data,
        split=config.split,
        split_index=config.split_index,
        normalise=config.normalise,
        missing=config.missing,
        self_loops=config.self_loops,
        root=runtime.data_root,
        drawn={"nodes": config.nodes, "degree": config.degree, "homophily": config.homophily},
    )


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of the graph in a named folder; None for others, which do not change."""
    if runtime.data_root is None or config.data in BUILT_IN:
        return None
    return load(config, runtime).fingerprint()
