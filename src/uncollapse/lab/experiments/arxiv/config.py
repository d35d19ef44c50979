"""Configuration, graph and model of the recipe `arxiv`."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from uncollapse.cures import ContraNorm
from uncollapse.errors import UsageError
from uncollapse.io.files import expand_user, user_cache
from uncollapse.lab.config.fields import config_field, reset_idle
from uncollapse.lab.data.graph import datasets, graph_files, splits
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.gcn.config import BUILT_IN, SHARE
from uncollapse.lab.models.rev_gat import GROUPS, RevGAT

D_CONTRA = "contra_norm_features"
LABELS: dict[str, Any] = {"minimum": 0.01, "maximum": 0.99}  # some labels are inputs, and some are predicted


@dataclass(frozen=True)
class Config:
    """Configuration of a run. The defaults are those of the published code, except for the graph, which is random."""

    data: str = config_field("arxiv_like", "The graph.", choices=datasets.NAMES)
    features: str = config_field(
        "", "File below --data-root with one row of features per node (.npy or .pt); without it the graph's own."
    )
    split: str = config_field(
        "published", "How nodes are split into training, validation and test.", choices=splits.SPLITS
    )
    split_index: int = config_field(0, "Number of the split, and seed of a random graph.", minimum=0, maximum=2**31)
    nodes: int = config_field(2000, "Random graphs: number of nodes.", minimum=180)
    layers: int = config_field(2, "Number of attention layers; all but two are reversible.", minimum=2)
    hidden: int = config_field(256, "Width of a head.", minimum=1)
    heads: int = config_field(3, "Heads of the hidden layers.", minimum=1)
    norm: str = config_field(
        D_CONTRA, "The norm after each hidden layer of the student: D-ContraNorm or none.", choices=("none", D_CONTRA)
    )
    scale: float = config_field(1.0, "Scale of D-ContraNorm.")
    temperature: float = config_field(1.0, "Temperature of D-ContraNorm.", minimum=1e-3)
    dropout: float = config_field(0.75, "Dropout before each layer but the first.", **SHARE)
    input_drop: float = config_field(0.25, "Dropout of features and labels that enter the first layer.", **SHARE)
    edge_drop: float = config_field(0.3, "Share of the edges that are dropped in each layer.", **SHARE)
    label_rate: float = config_field(
        0.5, "Share of the training labels that are inputs in a step; the others are predicted.", **LABELS
    )
    label_passes: int = config_field(
        1, "Passes whose predictions replace the labels that are not inputs, before the last pass.", minimum=0
    )
    teacher_epochs: int = config_field(
        2000, "Epochs of the teacher, the same network without norm; 0: no distillation.", minimum=0
    )
    distill: float = config_field(0.95, "Weight of the distillation loss; labels have the rest.", **SHARE)
    distill_temperature: float = config_field(0.7, "Temperature of the distillation.", minimum=1e-3)
    lr: float = config_field(2e-3, "Learning rate of RMSprop.", minimum=0)
    warmup: int = config_field(50, "Epochs in which the learning rate rises.", minimum=0)
    epochs: int = config_field(1000, "Epochs of the student.", minimum=1)
    seed: int = config_field(0, "Seed of weights, dropout and label masks.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        if self.layers > 2 and self.hidden % GROUPS:
            raise UsageError(f"hidden must be even for more than 2 layers, got {self.hidden} with {self.layers}.")
        idle = {
            "nodes": self.data not in datasets.DRAWN,
            "scale": self.norm == "none",
            "temperature": self.norm == "none",
            "distill": not self.teacher_epochs,
            "distill_temperature": not self.teacher_epochs,
        }
        reset_idle(self, [name for name, is_idle in idle.items() if is_idle])


def build(config: Config, graph: datasets.Graph, norm: str) -> nn.Module:
    """Return the network before training; its inputs are the features of a node and a column per class."""
    width = config.heads * config.hidden
    contra = partial(ContraNorm.preset, "arxiv", width, config.scale, temperature=config.temperature)
    return RevGAT(
        graph.x.shape[1] + graph.classes,
        graph.classes,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        norm=nn.Identity if norm == "none" else contra,
        dropout=config.dropout,
        input_drop=config.input_drop,
        edge_drop=config.edge_drop,
    )


def load(config: Config, runtime: Runtime) -> datasets.Graph:
    """Load the graph of a run, and its features from their own file if there is one."""
    graph = datasets.load_graph(
        config.data,
        split=config.split,
        split_index=config.split_index,
        self_loops="none",  # the network adds one per node
        root=runtime.data_root,
        drawn={"nodes": config.nodes},
    )
    if not config.features:
        return graph
    path = expand_user(runtime.data_root or user_cache()) / expand_user(config.features)
    return replace(graph, x=graph_files.read_features(path, len(graph.y)))


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of the graph in a named folder; None for others, which do not change."""
    if not config.features and (runtime.data_root is None or config.data in BUILT_IN):
        return None
    return load(config, runtime).fingerprint()
