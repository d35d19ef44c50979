"""Fine-tuning an encoder on sentences with a cure, beside the same run without one."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.targets import Result, slower
from uncollapse.io.hf_models import Origin
from uncollapse.lab.data.text.encoded_texts import EncodedTexts
from uncollapse.lab.data.text.glue import TASKS
from uncollapse.lab.experiments.glue import recipe as glue
from uncollapse.lab.experiments.glue.config import MINILM, Data
from uncollapse.lab.experiments.glue.training import Training

Steps = Callable[[], None]
WORDS = 30_000  # of the vocabulary
PLAIN = glue.Config(model=MINILM, task="rte")


def training(rounds: int = 5) -> Iterator[Result]:
    """Whole steps of the recipe: batches, forward and backward passes, AdamW."""
    for length, like in ((64, "RTE or MRPC"), (14, "CoLA or SST-2")):
        for precision in ("no", "bf16"):
            yield from _beside_vanilla(length, like, precision, rounds)


def _beside_vanilla(length: int, like: str, precision: str, rounds: int) -> Iterator[Result]:
    made = partial(steps, length=length, precision=precision)
    base = made(cure="none")
    kind = "float32" if precision == "no" else precision
    where = f"MiniLM, sentences about as long as those of {like}, {kind}"
    yield slower(f"steps with ContraNorm, {where}", 1.15, base, made(cure="contra_norm"), rounds)
    yield slower("  before the residual", None, base, made(cure="contra_norm", at="attention.output"), 2)
    features = made(cure="contra_norm", axis="features")
    yield slower("  over features (v2)", 1.2, base, features, rounds)
    yield slower("  the uniformity loss instead", None, base, made(cure="uniform_loss"), 2)


def steps(length: int, precision: str, count: int = 1, **changes: Any) -> Steps:
    """A few steps of a run, each on another batch."""
    config = glue.Config(**{**vars(PLAIN), **changes})
    task_of = TASKS[config.task]
    model = glue.build(config, Origin(config.model), task_of)
    data = Data({"train": sentences(count * config.batch, length)}, None, 0, task_of)
    training = Training(model, config, data)
    task = training.__enter__()
    model.train()

    def run() -> None:
        for batch in task.batches(1):
            task.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = task.loss(model, batch)
            torch.autograd.backward(loss)
            task.optimizer.step()

    return run


def sentences(count: int, length: int) -> EncodedTexts:
    """Made-up token ids; lengths spread around their mean as those of real sentences do."""
    generator = torch.Generator().manual_seed(0)
    lengths = (length * (0.5 + torch.rand(count, generator=generator))).long().clamp(min=3)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.randint(1000, WORDS, (int(starts[-1]),), generator=generator, dtype=torch.int32)
    return EncodedTexts(ids, starts, torch.zeros_like(ids, dtype=torch.uint8), torch.arange(count) % 2, 0)
