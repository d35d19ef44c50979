"""Build a Diagnosis from measured layers: its verdict, its labels and what is needed to repeat it."""

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from uncollapse.diagnosis import verdict
from uncollapse.diagnosis.advice import follow_causes, suggest
from uncollapse.diagnosis.causes import name_causes
from uncollapse.diagnosis.cautions import list_cautions
from uncollapse.diagnosis.layer_measures import spaced_tokens
from uncollapse.diagnosis.layer_stats import StatsConfig
from uncollapse.diagnosis.parts import Parts
from uncollapse.diagnosis.reference_data import outlook
from uncollapse.diagnosis.result import Diagnosis, Layer, Verdict
from uncollapse.diagnosis.verdict import Subject

LIBRARIES = (
    "torch",
    "transformers",
    "timm",
    "torch_geometric",
)  # a diagnosis records their versions if they are loaded


@dataclass(frozen=True)
class Labels:
    """How a diagnosis is labeled in tables and reports.

    model: the name of the model; its class if not given. data: a description of the data. example: the tokens of the
    first sequence as text, for the heat map. unknown: the share of tokens that the tokenizer does not know.
    """

    model: str | None = None
    data: str = ""
    example: Sequence[str] = ()
    unknown: float = 0.0


@dataclass(frozen=True)
class Measured:
    """What a measurement gives: the layers, those of a random baseline, and how much was seen.

    settings: what the measurement was asked to do. seconds: how long it took. parameters: their number in the model.
    parts: those of the blocks, if causes were looked for.
    """

    layers: tuple[Layer, ...]
    baseline: tuple[Layer, ...] = ()
    sequences: int = 1
    batches: int = 1
    parameters: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    parts: Parts | None = None


def build(measured: Measured, subject: Subject, labels: Labels) -> Diagnosis:
    """Return the diagnosis of measured layers."""
    return Diagnosis(
        model=labels.model or subject.architecture,
        architecture=subject.architecture,
        family=subject.family,
        parameters=measured.parameters,
        data=labels.data,
        batches=measured.batches,
        sequences=measured.sequences,
        tokens=measured.layers[0].tokens,
        layers=measured.layers,
        verdict=conclude(measured, subject),
        baseline=measured.baseline,
        example=tuple(labels.example[position] for position in spaced_tokens(len(labels.example))),
        settings=measured.settings,
        versions=_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(measured.seconds, 3),
        parts=measured.parts,
    )


def conclude(measured: Measured, subject: Subject) -> Verdict:
    """Return the verdict on measured layers, with its cautions, its causes if they were looked for, and advice."""
    found = verdict.evaluate(measured.layers, measured.baseline, subject, measured.sequences)
    certainty, cautions = list_cautions(found)
    causes = () if measured.parts is None else name_causes(found, measured.parts)
    tips = suggest(found.kind, found.onset, found.subject) if found.onset else ()
    tips = follow_causes(causes, tips, found.subject, found.kind)
    helps = outlook(subject.family, found.kind)
    return Verdict(found.kind, found.onset, certainty, found.sentence(), found.evidence, cautions, tips, helps, causes)


def settings_of(config: StatsConfig, places: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a measurement as a diagnosis stores them."""
    return {
        "places": list(places),
        "tokens": "all" if config.prefix else "patches",
        "attention": config.attention,
        "rank_samples": config.rank_samples,
        "seed": config.seed,
    }


def check_enough(tokens: int) -> None:
    """Raise ValueError unless there are at least two tokens."""
    if tokens < 2:
        raise ValueError(f"Collapse is about how tokens or rows differ; there must be at least two, got {tokens}.")


def _versions() -> dict[str, str]:
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("uncollapse", *LIBRARIES)}
    return {"python": platform.python_version(), **{name: str(value) for name, value in found.items() if value}}
