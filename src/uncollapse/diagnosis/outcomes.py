"""Say how often acting on a verdict has helped: `outcomes.json`, counted from stored runs.

`python -m experiments.outcomes` writes that file from `results/`; docs/trust.md shows the cases behind it.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from uncollapse.diagnosis.measured_gains import signed

ENOUGH, VARIED = 5, 3  # cases, and the data sets that they are on: seeds of one network are alike
NETWORKS = {"pyg": "graph networks", "huggingface": "transformers", "timm": "transformers", "torch": "transformers"}
CLEAR = "2 points"


@dataclass(frozen=True)
class Outcome:
    """What acting brought in like cases: how many there are, where it clearly helped or hurt, and the median gain.

    sources: from how many data sets or encoders. median: in points of the score.
    """

    cases: int
    sources: int
    helped: int
    hurt: int
    median: float


@cache
def read() -> dict[str, dict[str, Outcome]]:
    """Return the outcomes by what was mended ("graph networks", "transformers", "embeddings") and by the verdict."""
    text = resources.files(__package__).joinpath("outcomes.json").read_text(encoding="utf-8")
    return {what: {kind: Outcome(**of) for kind, of in kinds.items()} for what, kinds in json.loads(text).items()}


def outlook(family: str, kind: str) -> str:
    """Return in words how often acting has helped models of a family with this verdict; "" without models of the kind.

    >>> outlook("embeddings", "none")
    ''
    """
    what = NETWORKS.get(family)
    if what is None:
        return ""
    found = read().get(what, {}).get(kind)
    if found is None or found.cases < ENOUGH or found.sources < VARIED:
        return "" if kind == "none" else f"Too few {what} with this verdict were measured to say whether acting helps."
    counts = f"of {found.cases} trained {what} with this verdict, on {found.sources} data sets, the best cure"
    counts += (
        f" gained at least {CLEAR} in {found.helped} and lost as much in {found.hurt} (median {signed(found.median)})"
    )
    likely = found.helped > 2 * max(found.hurt, found.cases - found.helped)
    return f"{'Acting is likely to help' if likely else 'Whether acting helps is open'}: {counts}."


def embedding_outlook(acts: bool) -> str:
    """Return in words how often all_but_the_top raised scores by cosine of embeddings like these.

    "" without enough cases. acts: whether the geometry advises it.
    """
    found = read().get("embeddings", {}).get("act" if acts else "leave")
    if found is None or found.cases < ENOUGH:
        return ""
    who = f"of {found.cases} such layers of {found.sources} encoders"
    helped = f"{found.helped} and lowered that of {found.hurt} (median {signed(found.median)} points)"
    return f"{who}, removing common directions raised the score of {helped}"
