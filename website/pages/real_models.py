"""Tables of the page of real models, from results/real_models/. `website/tables.py` puts them in place.

python -m website.pages.real_models    # writes the curves of healthy models that reports show
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from uncollapse.diagnosis import reference_data
from uncollapse.diagnosis.result import Diagnosis, Layer
from uncollapse.io.files import write

RESULTS = Path(__file__).parents[2] / "results" / "real_models"

# ContraNorm, arXiv 2303.06562, read off the figures: about ±0.05 for similarities
PAPER_FEATURES = (0.347, 0.423, 0.472, 0.461, 0.476, 0.481, 0.482, 0.458, 0.464, 0.457, 0.523, 0.621)
PAPER_ATTENTION = (0.571, 0.663, 0.599, 0.644, 0.603, 0.650, 0.608, 0.654, 0.687, 0.650, 0.655, 0.736)
PAPER_DEPTH = {0: (24.6, 8.7), 12: (22.7, 8.2), 35: (14.4, 32.9), 71: (12.2, 42.6)}  # rank, variance; no ContraNorm

HEALTHY = {"text encoder": ("minilm", "sre", "mpnet"), "decoder": ("smollm2", "gemma3")}  # all on the same text

Row = tuple[str, ...]


def found(name: str) -> Diagnosis | None:
    """A diagnosis of this name, if it was measured."""
    path = RESULTS / f"{name}.json"
    return Diagnosis.load(path) if path.exists() else None


def overview() -> tuple[Row, Sequence[Row]]:
    """One line per diagnosis or part of a model: its verdict and the last block."""
    head = (
        "model",
        "data",
        "tokens",
        "verdict",
        "onset",
        "certainty",
        "cosine",
        "robust cosine",
        "rank",
        "rank share",
        "dataset share",
    )
    names = sorted(p.stem for p in RESULTS.glob("*.json") if p.stem != "false_alarms")
    return head, [_line(part) for name in names if (d := found(name)) is not None for part in (d, *d.others)]


def _line(d: Diagnosis) -> Row:
    last = blocks(d)[-1]
    v = d.verdict
    numbers = (
        f"{last[m]:.2f}" for m in ("mean_cosine", "robust_cosine", "effective_rank", "rank_share", "dataset_rank_share")
    )
    return (d.model, d.data, f"{d.tokens:,}", v.kind, v.onset or "–", v.certainty, *numbers)


def blocks(d: Diagnosis) -> list[Layer]:
    """The residual stream after each block."""
    return [layer for layer in d.layers if layer.place == "block" and layer.name not in ("embed", "final")]


def runs(prefix: str) -> tuple[Row, Sequence[Row]]:
    """Training runs: accuracy beside what the diagnosis says of the last block."""
    head = ("run", "test accuracy", "verdict", "onset", "robust cosine, last block", "rank share, last block", "seed")
    return head, list(_runs(prefix))


def _runs(prefix: str) -> Iterator[Row]:
    for path in sorted((RESULTS / "runs").glob(f"{prefix}*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        d = found(path.stem) or found(f"{path.stem}_trained")
        if d is not None:
            last = blocks(d)[-1]
            cells = (f"{last['robust_cosine']:.3f}", f"{last['rank_share']:.3f}", str(run["seed"]))
            yield (d.model, f"{100 * _test(run):.1f} %", d.verdict.kind, d.verdict.onset or "–", *cells)


def _test(run: dict[str, Any]) -> float:
    return float(run["figures"]["test"])


def vit_rates() -> tuple[Row, Sequence[Row]]:
    """Validation accuracy of the deep ViT by learning rate: mean over seeds."""
    runs_of = json.loads((RESULTS.parent / "vit_digits_rates.json").read_text(encoding="utf-8"))["runs"]
    rates = sorted({run["config"]["lr"] for run in runs_of})
    rows = []
    for norm, label in (("layer", "LayerNorm"), ("contra", "ContraNorm")):
        cells = []
        for rate in rates:
            key = (norm, rate)
            got = [
                r["epochs"][-1]["validation_accuracy"]
                for r in runs_of
                if (r["config"]["norm"], r["config"]["lr"]) == key
            ]
            cells.append(f"{100 * sum(got) / len(got):.1f} % ({len(got)})" if got else "–")
        rows.append((label, *cells))
    return ("norm", *(f"lr {rate:g} (seeds)" for rate in rates)), rows


def paper_similarity() -> tuple[Row, Sequence[Row]]:
    """Feature and attention similarity on STS-B: the paper's BERT-12 beside MiniLM-6 at the same relative depth."""
    head = (
        "layer of BERT-12 (paper)",
        "features, paper",
        "attention, paper",
        "layer of MiniLM-6 (ours)",
        "features, ours",
        "attention, ours",
    )
    d = found("minilm_stsb")
    if d is None:
        return head, []
    ours, rows = blocks(d), []
    for at, (feature, attention) in enumerate(zip(PAPER_FEATURES, PAPER_ATTENTION, strict=True)):
        mine = ours[at // 2] if at % 2 else None  # after the same share of the depth
        cells = (
            ("", "", "")
            if mine is None
            else (str(at // 2), f"{mine['mean_cosine']:.3f}", f"{mine['attention_similarity']:.3f}")
        )
        rows.append((str(at), f"{feature:.3f}", f"{attention:.3f}", *cells))
    return head, rows


def paper_depth() -> tuple[Row, Sequence[Row]]:
    """Rank and variance of 72 layers: the paper's fine-tuned BERT beside our untrained one."""
    head = (
        "layer",
        "rank, paper (fine-tuned)",
        "rank, ours (untrained)",
        "variance, paper (fine-tuned)",
        "variance, ours (untrained)",
    )
    d = found("bert72_untrained")
    if d is None:
        return head, []
    ours = blocks(d)
    rows = [
        (str(at), f"{rank}", f"{ours[at]['effective_rank']:.1f}", f"{variance}", f"{ours[at]['feature_variance']:.1f}")
        for at, (rank, variance) in PAPER_DEPTH.items()
    ]
    return head, rows


def false_alarms() -> tuple[Row, Sequence[Row]]:
    """How many of the draws of each kind of text were called collapsed."""
    head = ("model", "sequences per draw", "draws", "called collapsed", "of these with high certainty")
    path = RESULTS / "false_alarms.json"
    if not path.exists():
        return head, []
    kept = json.loads(path.read_text(encoding="utf-8"))["runs"]
    groups = dict.fromkeys((run["model"], run["sequences"]) for run in kept)
    rows = []
    for model, size in groups:
        group = [run for run in kept if (run["model"], run["sequences"]) == (model, size)]
        alarms = [run for run in group if run["kind"] != "none"]
        sure = sum(run["certainty"] == "high" for run in alarms)
        rows.append((model, str(size), str(len(group)), str(len(alarms)), str(sure)))
    return head, rows


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "real_models": overview,
    "vit_runs": lambda: runs("vit"),
    "vit_rates": vit_rates,
    "gcn_runs": lambda: runs("gcn"),
    "paper_similarity": paper_similarity,
    "paper_depth": paper_depth,
    "false_alarms": false_alarms,
}


def healthy_curves() -> str:
    """The text of the shipped file: by kind, model and measure, the values at even steps of depth."""
    found_models: dict[str, dict[str, dict[str, list[float]]]] = {}
    for kind, names in HEALTHY.items():
        for d in (d for name in names if (d := found(name)) is not None):
            layers = [layer for layer in d.layers if layer.place == "block"]
            found_models.setdefault(kind, {})[d.model] = {
                m: _steps([at[m] for at in layers]) for m in reference_data.HEALTHY_MEASURES
            }
    kinds = []
    for kind, models in found_models.items():
        lines = (f"  {json.dumps(name)}: {json.dumps(of)}" for name, of in models.items())
        kinds.append(f' "{kind}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


def _steps(values: Sequence[float]) -> list[float]:
    return [
        round(reference_data.interpolate(values, step / reference_data.HEALTHY_STEPS), 3)
        for step in range(reference_data.HEALTHY_STEPS + 1)
    ]


if __name__ == "__main__":
    target = Path(reference_data.__file__).with_name(reference_data.HEALTHY_FILE)
    write(target, healthy_curves())
    print(f"{target.name} is written.")
