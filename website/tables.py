"""Tables of the documentation by name, from the registries and from results/.

A comment `<!-- table: NAME -->` on a page stands for the table called NAME; `website/render.py` puts it there.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from website import reference
from website.pages import (
    arena,
    comparisons,
    concepts,
    embeddings,
    graphs,
    hypersphere,
    kernel,
    real_models,
    results,
    scale,
    text,
    trust,
    tuning,
    vision,
    zoo,
)

RESULTS = Path(__file__).parents[1] / "results"


def mending() -> str:
    """The deep vision transformer as it is and with ContraNorm attached; nothing if it was not run."""
    file = RESULTS / "mend_vit.json"
    if not file.exists():
        return ""
    runs = json.loads(file.read_text(encoding="utf-8"))
    names = {"plain": "unchanged", "longer": "twice as many epochs", "mended": "ContraNorm at every norm"}
    rows = (
        (
            names[name],
            f"{run['effective_rank']:.2f}",
            f"{run['mean_cosine']:.2f}",
            f"{run['figures']['test']:.1%}",
            f"{run['cpu_seconds']:.0f} s",
            run["verdict"].partition(":")[0],
        )
        for name, run in runs.items()
    )
    head = (
        "",
        "effective rank after the last block",
        "mean cosine there",
        "test accuracy",
        "CPU time of training",
        "verdict",
    )
    return f"{reference.table(head, rows)}\n\nBy `python examples/mend_vit.py --out results/mend_vit.json`."


def calibration_layers(task: str) -> str:
    """Scores of each layer of the encoders on a task: as they are, with all-but-the-top, and what auto did."""
    folder = sorted((RESULTS / "calibration").glob(f"*-{task}--*.json"))
    rows = []
    for record in (json.loads(path.read_text()) for path in folder):
        config = record["config"]
        own = config["model"].startswith("package:")
        model = config["model"].removeprefix("package:").split("/")[0 if own else -1]
        name = f"{model}{', random' if config['random'] else ''}"
        for layer in record["layers"]:
            scores, gain = layer["scores"], layer["gain"]
            interval = f"{100 * gain['low']:+.1f} … {100 * gain['high']:+.1f}"
            numbers = (f"{100 * scores[key]:.1f}" for key in ("none", "all_but_the_top"))
            geometry = f"{layer['geometry']['mean_cosine']:.2f}"
            rows.append(
                (f"{name}, {config['pooling']}", str(layer["layer"]), geometry, *numbers, interval, layer["auto"])
            )
    head = ("encoder", "layer", "mean cosine", "unchanged", "top removed", "gain, 95 % interval", "auto chose")
    return reference.table(head, rows) if rows else "*Not run yet.*"


def known_causes() -> str:
    """Models whose cause of collapse is known, and the causes that were named."""
    file = RESULTS / "causes.json"
    if not file.exists():
        return results.NOT_RUN
    rows = []
    for case in json.loads(file.read_text(encoding="utf-8"))["cases"]:
        score = "–" if case["test"] is None else f"{case['test']:.1%}"
        named = ", ".join(case["causes"]) or "none"
        rows.append((case["name"], score, case["collapse"], case["expected"] or "none", named))
    return reference.table(("model", "test accuracy", "collapse", "expected first cause", "named causes"), rows)


def early_alarm() -> str:
    """How often the early alarm is right: on the runs on which it was chosen, on the others, and on stored runs."""
    file = RESULTS / "early_alarm" / "summary.json"
    if not file.exists():
        return results.NOT_RUN
    found = json.loads(file.read_text(encoding="utf-8"))
    parts = {"trained for this: those on which the bounds were chosen": found["chosen_on"]}
    parts["trained for this: all others"] = found["held_out"]
    parts |= {f"– of these, {kind}": counts for kind, counts in found["held_out_by_kind"].items()}
    parts["– of these, trained after the bounds were settled"] = found["held_out_later"]
    parts["stored GCNs, rank share before the first step"] = found["stored_before_training"]
    rows = []
    for name, c in parts.items():
        counts = (f"{c['hits']} of {c['dead']}", f"{c['dead'] - c['hits']}", f"{c['false_alarms']} of {c['alive']}")
        rows.append((name, f"{c['dead'] + c['alive']}", *counts))
    return reference.table(("", "runs", "failing runs found", "missed", "false alarms"), rows)


def early_proof() -> str:
    """Scores of runs that got an alarm, as they were and with the first advice."""
    file = RESULTS / "early_alarm" / "proof.json"
    if not file.exists():
        return results.NOT_RUN
    rows = []
    for p in json.loads(file.read_text(encoding="utf-8"))["proofs"]:
        scores = (f"{p[key]:.1%}" for key in ("without", "with"))
        rows.append((str(p["seed"]), f"{p['alarm_at']} of {p['steps']}", f"`{p['advice']}`", *scores))
    head = ("seed", "alarm at step", "advice for the cause", "unchanged", "with the advice")
    return reference.table(head, rows)


def benchmarks(name: str) -> str:
    """The targets of a file of benchmarks next to what was measured."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return results.NOT_RUN
    result = json.loads(file.read_text(encoding="utf-8"))
    said = {True: "yes", False: "no", None: "no target"}
    rows = (
        (t["name"], t["target"], f"{_measured(t['measured'])} {t['unit']}", said[t["reached"]], t["detail"])
        for t in result["targets"]
    )
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    table = reference.table(("what", "target", "measured", "reached", "detail"), rows)
    threads = result["config"]["threads"]
    machine = f"{result['processor']}, {threads} {'thread' if threads == 1 else 'threads'}"
    return f"{table}\n\nMeasured on {result['date'][:10]} with {versions}, on {machine}, by `make bench`."


def times(name: str) -> str:
    """What a file of benchmarks measured, without the targets."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return results.NOT_RUN
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = (
        (f"– {t['name'].strip()}" if t["name"].startswith(" ") else t["name"], f"{t['measured']:.2f}", t["detail"])
        for t in result["targets"]
    )
    return reference.table(("", "× the time", f"measured on {result['date'][:10]}"), rows)


def targets() -> str:
    """Every target of the benchmarks next to what was measured, also where it was missed, and on which machine."""
    rows, machines, dates = [], set(), set()
    for file in sorted(RESULTS.glob("benchmarks*.json")):
        result, above = json.loads(file.read_text(encoding="utf-8")), ""
        machines.add(f"{result['processor']} ({result['config']['cores']} cores)")
        dates.add(result["date"][:10])
        for t in result["targets"]:
            indented = t["name"].startswith(" ")  # a variant of the one above
            name = f"{above}: {t['name'].strip()}" if indented else t["name"]
            above = above if indented else t["name"]
            if t["reached"] is not None:
                mark = "yes" if t["reached"] else "**missed**"
                rows.append((name, f"{t['target']} {t['unit']}", _measured(t["measured"]), mark))
    if not rows:
        return results.NOT_RUN
    table = reference.table(("work", "target", "measured", "reached"), rows)
    when = " to ".join(sorted({min(dates), max(dates)}))
    return f"{table}\n\nMeasured on {' and '.join(sorted(machines))}, {when}."


def _measured(number: float) -> str:
    """Return three digits, or all those before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def diverse_patch() -> str:
    """What became of the four ways of examples/diverse_patch.py; nothing before it has run."""
    file = RESULTS / "diverse_patch.json"
    if not file.exists():
        return ""
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = (
        (
            run["way"],
            f"{100 * run['test_accuracy']:.1f} %",
            f"{run['mean_cosine']:.2f}",
            f"{run['effective_rank']:.1f}",
            f"{run['cpu_seconds']:.0f} s",
        )
        for run in result["runs"]
    )
    head = ("run", "test accuracy", "cosine, last block", "effective rank, last block", "CPU time of training")
    vit, versions = result["config"]["vit"], result["versions"]
    return (
        f"{reference.table(head, rows)}\n\n{vit['depth']} blocks, {vit['epochs']} epochs, seed {result['seed']}; "
        f"{result['date'][:10]}, torch {versions['torch']}, timm {versions['timm']}."
    )


def _of(parts: dict[str, Callable[[], Any]], name: str) -> Callable[[], str]:
    def filled() -> str:
        head, rows = parts[name]()
        return reference.table(head, rows) if rows else results.NOT_RUN

    return filled


BENCHMARKS = {  # table -> file in results/
    "benchmarks": "benchmarks",
    "graph_costs": "benchmarks_graphs",
    "text_costs": "benchmarks_text",
    "vision_costs": "benchmarks_vision",
    "hypersphere_speed": "benchmarks_hypersphere",
    "gathering": "benchmarks_gather",
    "streaming": "benchmarks_streaming",
    "mended_files": "benchmarks_mending",
}
TABLES: dict[str, Callable[[], str]] = {
    "overhead": partial(times, "benchmarks_diagnose"),
    "attaching": partial(times, "benchmarks_attach"),
    **{name: partial(benchmarks, file) for name, file in BENCHMARKS.items()},
    "mending": mending,
    "targets": targets,
    "known_causes": known_causes,
    "early_alarm": early_alarm,
    "early_proof": early_proof,
    "diverse_patch": diverse_patch,
    **{name: _of(real_models.PARTS, name) for name in real_models.PARTS},
    **{name: _of(concepts.PARTS, name) for name in concepts.PARTS},
    **{name: _of(comparisons.PARTS, name) for name in comparisons.PARTS},
    **{name: _of(embeddings.PARTS, name) for name in embeddings.PARTS},
    **{name: _of(graphs.PARTS, name) for name in graphs.PARTS},
    **{name: _of(kernel.PARTS, name) for name in kernel.PARTS},
    **{name: _of(scale.PARTS, name) for name in scale.PARTS},
    **{name: _of(text.PARTS, name) for name in text.PARTS},
    **{name: _of(vision.PARTS, name) for name in vision.PARTS},
    **{name: _of(tuning.PARTS, name) for name in tuning.PARTS},
    **{name: _of(hypersphere.PARTS_OF_PAGE, name) for name in hypersphere.PARTS_OF_PAGE},
    **{name: _of(trust.PARTS, name) for name in trust.PARTS},
    **{name: _of(zoo.PARTS, name) for name in zoo.PARTS},
    **arena.TEXTS,
    **graphs.TEXTS,
    **trust.TEXTS,
    **zoo.TEXTS,
    **text.TEXTS,
    **vision.TEXTS,
    **tuning.TEXTS,
    **hypersphere.TEXTS,
    "calibration_layers": partial(calibration_layers, "stsb"),
    "calibration_molecules": partial(calibration_layers, "molecules"),
    **reference.TEXTS,
}
