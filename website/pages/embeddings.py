"""Tables of the page on embeddings: the optimum by dimension, what self pairs do, and sentence embeddings of STS-B."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uncollapse as uc

RESULT = Path(__file__).parents[2] / "results" / "text" / "sts_embeddings.json"
DIMENSIONS = (2, 8, 16, 32, 64, 128, 256, 384, 768, 1024, 1536, 4096)
SHARPNESSES = (1.0, 2.0, 3.0)
COUNTS = (100, 1_000, 10_000, 100_000)
WIDTH = 384  # features of MiniLM's embeddings, which the result is about
Row = tuple[str, ...]


def optima() -> tuple[Row, Sequence[Row]]:
    """The least uniformity there is, by dimension and sharpness."""
    rows = [(f"{d:,}", *(_number(uc.uniformity_optimum(d, t)) for t in SHARPNESSES)) for d in DIMENSIONS]
    return ("dimensions", *(f"t = {t:g}" for t in SHARPNESSES)), rows


def self_pairs() -> tuple[Row, Sequence[Row]]:
    """What perfectly uniform rows of 128 dimensions would have if each row also counted as a pair with itself."""
    optimum = uc.uniformity_optimum(128)
    rows = []
    for n in COUNTS:
        potential = math.exp(optimum)
        with_self = math.log(potential + (1 - potential) / n)  # n of n² pairs have the potential 1
        rows.append((f"{n:,}", _number(with_self), f"{uc.uniformity_gap(with_self, 128):.1f} %"))
    return ("rows", "uniformity with self pairs", "from the optimum"), rows


def judged() -> tuple[Row, Sequence[Row]]:
    """MiniLM's sentence embeddings at three stages, on the test pairs of STS-B; without rows where that was not run."""
    if not RESULT.exists():
        return (), []
    found = json.loads(RESULT.read_text(encoding="utf-8"))["untrained"]
    plain = [row for row in found if row["cure"] == "none"]
    last = max(row["blocks"] for row in plain)
    wanted = [row for row in plain if row["weights"] == "pretrained" or row["blocks"] == last]
    head = (
        "embeddings",
        "alignment",
        "two at random",
        "uniformity",
        "from the optimum",
        "Spearman with human ratings",
    )
    return head, [_stage(row) for row in sorted(wanted, key=lambda row: row["test"]["spearman"])]


def _stage(row: dict[str, Any]) -> Row:
    figures = row["test"]
    return (
        f"{row['weights']} weights, after block {row['blocks']}",
        _number(figures["alignment"]),
        _number(2 - 2 * figures["mean_cosine"]),
        _number(figures["uniformity"]),
        f"{uc.uniformity_gap(figures['uniformity'], WIDTH):.0f} %",
        _number(figures["spearman"]),
    )


def _number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "judging_optima": optima,
    "judging_self_pairs": self_pairs,
    "judging_sentences": judged,
}
