"""A demonstration: the rank of a deep, untrained Transformer, block by block, with and without ContraNorm.

The model is made of torch.nn parts with their own initialisation: token and position embeddings, then post-norm blocks

    x = LayerNorm(x + attention(x))      x = LayerNorm(x + ffn(x))

At initialisation attention is close to a mean over all tokens, so each block adds nearly the same vector to every
token, and the tokens grow alike. The second run has the same weights, and ContraNorm after each attention residual, in
front of the LayerNorm, which is its default position in the paper (arXiv 2303.06562). Nothing is trained: the figures
show what happens to the rank, not what happens to an accuracy.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from uncollapse import __version__
from uncollapse.cures.contra_norm import contra_norm
from uncollapse.metrics import effective_rank, mean_cosine

BAR_WIDTH = 16


@dataclass(frozen=True)
class Setup:
    """Sizes of the model and of its input, the scale of ContraNorm, and the seed of weights and tokens."""

    blocks: int = 48
    dim: int = 128
    heads: int = 4
    ffn: int = 256
    vocabulary: int = 256
    sequences: int = 8
    tokens: int = 64
    scale: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """The tokens after a block (0: the embeddings), as means over the sequences."""

    block: int
    effective_rank: float
    mean_cosine: float


class Block(nn.Module):
    """A post-norm Transformer block; `scale` > 0 puts ContraNorm after the attention residual."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(setup.dim, setup.heads, batch_first=True)
        self.attention_norm = nn.LayerNorm(setup.dim)
        self.ffn = nn.Sequential(nn.Linear(setup.dim, setup.ffn), nn.GELU(), nn.Linear(setup.ffn, setup.dim))
        self.ffn_norm = nn.LayerNorm(setup.dim)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        """(sequences, tokens, dim) -> the same shape."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.attention_norm(contra_norm(x, scale))  # scale 0 is the identity
        out: Tensor = self.ffn_norm(x + self.ffn(x))
        return out


def build(setup: Setup) -> tuple[Tensor, list[Block]]:
    """Embedded random tokens (sequences, tokens, dim) and the blocks. The global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        token, position = nn.Embedding(setup.vocabulary, setup.dim), nn.Embedding(setup.tokens, setup.dim)
        ids = torch.randint(setup.vocabulary, (setup.sequences, setup.tokens))
        blocks = [Block(setup).eval() for _ in range(setup.blocks)]
    return nn.functional.layer_norm(token(ids) + position.weight, (setup.dim,)), blocks


@torch.no_grad()
def trace(x: Tensor, blocks: Sequence[Block], scale: float) -> list[Row]:
    """Run x through the blocks and measure it before the first and after each."""
    rows = [_row(0, x)]
    for number, block in enumerate(blocks, start=1):
        x = block(x, scale)
        rows.append(_row(number, x))
    return rows


def _row(block: int, x: Tensor) -> Row:
    return Row(block, round(float(effective_rank(x).mean()), 4), round(float(mean_cosine(x).mean()), 4))


def run(setup: Setup) -> dict[str, Any]:
    """Both runs, with all that is needed to repeat them; the result can be written as JSON."""
    started = time.perf_counter()
    x, blocks = build(setup)
    plain, mended = trace(x, blocks, 0.0), trace(x, blocks, setup.scale)
    return {
        "what": "token representations of an untrained post-norm Transformer, block by block",
        "config": asdict(setup),
        "seed": setup.seed,
        "versions": {"torch": str(torch.__version__), "uncollapse": __version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 3),
        "plain": [asdict(row) for row in plain],
        "contra_norm": [asdict(row) for row in mended],
    }


def table(result: dict[str, Any], every: int = 4) -> Table:
    """The result as a table with a bar for each rank; every fourth block."""
    most = min(result["config"]["tokens"], result["config"]["dim"])
    out = Table(caption=f"Effective rank: at most {most}. Mean cosine: 1 = all tokens point the same way.")
    out.add_column("block", justify="right")
    for name in ("as it is", f"with ContraNorm, scale {result['config']['scale']}"):
        out.add_column(f"{name}\neffective rank", no_wrap=True)
        out.add_column("mean\ncosine", justify="right")
    for plain, mended in list(zip(result["plain"], result["contra_norm"], strict=True))[::every]:
        cells = (f(row) for row in (plain, mended) for f in (lambda r: _bar(r["effective_rank"], most), _cosine))
        out.add_row(str(plain["block"]), *cells)
    return out


def _cosine(row: dict[str, Any]) -> str:
    return f"{row['mean_cosine']:.2f}"


def _bar(value: float, most: float) -> str:
    return f"{value:5.1f} {'█' * round(BAR_WIDTH * value / most)}"


def main(json_file: Path | None = None) -> int:
    """Print the table; with `json_file`, write the figures there too."""
    console = Console(highlight=False)
    result = run(Setup())
    size = result["config"]
    console.print(
        f"An untrained post-norm Transformer of {size['blocks']} blocks (width {size['dim']}, {size['heads']} heads, "
        f"torch's own initialisation, seed {size['seed']}) reads {size['sequences']} sequences of {size['tokens']} "
        "random tokens. The second run has the same weights and ContraNorm after each attention residual."
    )
    console.print(table(result))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        whole = json_file.with_name(json_file.name + ".part")  # so that a file of this name is never half written
        whole.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        whole.replace(json_file)
        console.print(f"Figures written to {json_file}.", soft_wrap=True, markup=False)
    return 0
