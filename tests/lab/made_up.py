"""A recipe that was never run, and results of it made by hand."""

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from uncollapse.lab.tables.paper_table import PaperTable, Published


@dataclass(frozen=True)
class Config:
    data: str = "cora"
    norm: str = "none"
    layers: int = 2
    scale: float = 1.0
    epochs: int = 200
    widths: tuple[int, ...] = (32,)
    clip: float | None = None
    seed: int = 0


def name_of(config: Config) -> str:
    return f"{config.data}-{config.norm}-L{config.layers}-seed{config.seed}"


def result(test: float | None, *, validation: float | None = 0.5, **fields: Any) -> dict[str, Any]:
    """The record of a run, as it is read from its file."""
    config = Config(**fields)
    figures = {"validation": validation, "test": test}
    return {
        "recipe": "made-up",
        "config": asdict(config) | {"widths": [*config.widths]},
        "seed": config.seed,
        "figures": figures,
    }


def runs(*tests: float | None, **fields: Any) -> list[dict[str, Any]]:
    """Results of the seeds 0, 1, …"""
    return [result(test, **fields, seed=seed) for seed, test in enumerate(tests)]


def published(norm: str, layers: int, mean: float, std: float | None = None, data: str = "cora") -> Published:
    return Published({"data": data, "norm": norm, "layers": layers}, mean, std, "Table 3")


PAPER = (published("none", 2, 81.75, 0.51), published("none", 16, 23.88, 3.06), published("contra", 16, 79.75, 0.33))
TABLE = PaperTable("Depth", {"epochs": 200}, "data", "norm", "layers", choose=("scale",), published=PAPER)
RECIPE = SimpleNamespace(
    name="made-up",
    title="A made-up recipe",
    paper="",
    config=Config,
    run=None,
    name_of=name_of,
    tables={"depth": TABLE, "shallow": PaperTable("Shallow", {"layers": 2}, "data", "norm", "layers")},
    grids={"all": None},
)
