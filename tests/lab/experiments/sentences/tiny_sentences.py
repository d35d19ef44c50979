"""A corpus and a task of made-up sentences: each document has words of its own, so that neighbours can be learnt."""

import random
from pathlib import Path

from uncollapse.lab.experiments.sentences.recipe import Config

TINY = Config(
    data="tiny",
    tasks=("mr",),
    vocabulary=200,
    holdout=0.2,
    embedding=8,
    width=8,
    dim=4,
    epochs=2,
    batch=8,
    temperature=0.1,
    lr=1e-2,
)


def put_tiny(root: Path, documents: int = 20) -> Path:
    """Files in a folder of data sets: 20 documents of 8 sentences about one of 4 subjects, and which subject it is."""
    source = random.Random(0)
    (root / "tiny").mkdir(parents=True, exist_ok=True)
    blocks = ["\n".join(_sentence(source, number % 4) for _ in range(8)) for number in range(documents)]
    (root / "tiny" / "a.txt").write_text("\n\n".join(blocks), encoding="utf-8")
    lines = [f"{number % 2} {_sentence(source, number % 4)}" for number in range(80)]
    (root / "rt-polarity.all").write_text("\n".join(lines), encoding="utf-8")
    return root


def _sentence(source: random.Random, subject: int) -> str:
    own = [f"w{subject}x{source.randrange(6)}" for _ in range(3)]
    return " ".join([*own, *(f"any{source.randrange(10)}" for _ in range(source.randrange(1, 4)))])
