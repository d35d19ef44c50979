"""Check the choice of `EmbeddingTransform("auto")` against outcomes: real encoders, layer by layer, on real tasks."""

from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.calibration.config import PAIRS, Config, load_sentences
from uncollapse.lab.experiments.calibration.training import NAME, run
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import fingerprint


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    model = config.model.removeprefix("package:").strip("/").split("/")[0 if "package:" in config.model else -1]
    return f"{model}{'-random' if config.random else ''}-{config.pooling}-{config.task}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    sides = 2 if config.task in PAIRS else 1
    return 10 + 0.03 * sides * config.examples


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of the labels at hand."""
    return fingerprint([load_sentences(config, runtime).labels])


DATA = recipe_data.read(__package__, Config)
RECIPE = Recipe(
    name=NAME,
    title="Scores of the layers of real encoders before and after each transform of their embeddings",
    paper="All-but-the-Top, ICLR 2018, arXiv 1702.01417",
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    fingerprint=data_fingerprint,
)
