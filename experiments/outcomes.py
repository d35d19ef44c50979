"""Count from the stored results how often acting on a verdict helped, for the package: `diagnosis/outcomes.json`.

python -m experiments.outcomes
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uncollapse.diagnosis import reference_data
from uncollapse.embeddings.geometry import advise
from uncollapse.io import files
from uncollapse.lab.experiments.calibration import model_outcomes
from uncollapse.lab.experiments.calibration.analysis import Case, cases
from uncollapse.lab.experiments.calibration.recipe import PAIRS

RESULTS = Path(__file__).parents[1] / "results"
TARGET = Path(reference_data.__file__).with_name(reference_data.OUTCOMES_FILE)


def count(results: Path = RESULTS) -> dict[str, Any]:
    """Return the outcomes of networks by verdict, and of embeddings by what the geometry advises."""
    found = cases(json.loads(path.read_text()) for path in sorted((results / "calibration").glob("*.json")))
    by_cosine = [case for case in found if case.task in PAIRS]
    acting = [case for case in by_cosine if advise(case.geometry).method != "none"]
    leaving = [case for case in by_cosine if advise(case.geometry).method == "none"]
    embeddings = {"act": _summary(acting), "leave": _summary(leaving)}
    return {**model_outcomes.summarize(model_outcomes.read(results)), "embeddings": embeddings}


def _summary(found: Sequence[Case]) -> dict[str, float]:
    return {
        "cases": len(found),
        "sources": len({case.model for case in found}),
        "helped": sum(case.helps is True for case in found),
        "hurt": sum(case.helps is False for case in found),
        "median": round(100 * statistics.median(case.gain for case in found), 1) + 0.0,  # no −0.0
    }


def as_json(found: dict[str, Any]) -> str:
    """Return the text of the shipped file: one line per verdict."""
    blocks = (
        f' "{what}": {{\n' + ",\n".join(f'  "{kind}": {json.dumps(of)}' for kind, of in kinds.items()) + "\n }"
        for what, kinds in found.items()
    )
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    files.write(TARGET, as_json(count()))
    print(f"{TARGET.name} is written.")
