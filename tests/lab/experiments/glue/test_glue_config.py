"""What the recipes on sentences share: data, cures, batches, loss, evaluation."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.tiny_text import SENTENCES, tiny_model, write_sst2
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from uncollapse.backbones.huggingface_blocks import ALBERT_NUMBERS, NUMBERS
from uncollapse.cures import ContraNorm
from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin, load_classifier
from uncollapse.lab.data.text import glue
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.glue import config as sentences
from uncollapse.lab.experiments.glue import training as sentence_training
from uncollapse.lab.experiments.glue.config import Config, Data
from uncollapse.lab.experiments.glue.training import Training
from uncollapse.lab.models.text_classifier import L2Norm, logits_on_cpu
from uncollapse.lab.recipe import RECIPES

TABLES = {"bert": NUMBERS, "albert": ALBERT_NUMBERS}
BASE = Config(task="sst2", max_length=64, batch=8, holdout=0.0)


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Origin]:
    return {kind: Origin(str(tiny_model(tmp_path_factory.mktemp(kind), kind))) for kind in TABLES}


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))
    return Runtime(write_sst2(tmp_path, SENTENCES), device="cpu")


def made(origin: Origin) -> nn.Module:
    with use_seed(0):
        return load_classifier(origin, 2).eval()


def cures(model: nn.Module) -> list[ContraNorm]:
    found = [cure for attachment in uc.attachments(model) for cure in attachment.cures.values()]
    assert all(isinstance(cure, ContraNorm) for cure in found)
    return [cure for cure in found if isinstance(cure, ContraNorm)]


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("number", range(1, 9))
def test_every_number_of_the_paper(origins: dict[str, Origin], runtime: Runtime, kind: str, number: int) -> None:
    model, data = made(origins[kind]), sentences.load(BASE, runtime, origins[kind])
    batch = data.parts["dev"].batch(torch.arange(4))
    plain = logits_on_cpu(model, batch)
    sentences.put_cure(model, replace(BASE, at=str(number), scale=0.9))
    (attachment,) = uc.attachments(model)
    assert (attachment.at, attachment.blocks) == ((TABLES[kind][number],), (0, 1))
    assert float((logits_on_cpu(model, batch) - plain).abs().max()) > 1e-6


OPTIONS: tuple[dict[str, Any], ...] = (
    {"identity": False},
    {"dual": True},
    {"axis": "features"},
    {"temperature": 0.2},
    {"scale": 0.7},
    {"padding": "counted"},
    {"norm": "l2"},
)


@pytest.mark.parametrize("kind", TABLES)
def test_every_option_reaches_the_layer(origins: dict[str, Origin], runtime: Runtime, kind: str) -> None:
    data = sentences.load(BASE, runtime, origins[kind])
    batch = data.parts["dev"].batch(torch.arange(4))
    found = []
    for options in ({}, *OPTIONS):
        config = replace(BASE, scale=0.5)
        config = replace(config, **options)
        model = made(origins[kind])
        sentences.put_cure(model, config)
        for cure in cures(model):
            told = {name: cure.options[name] for name in ("identity", "dual", "axis", "temperature")}
            assert told == {name: getattr(config, name) for name in told}
            assert cure.scale == config.scale
        assert any(isinstance(module, L2Norm) for module in model.modules()) is (config.norm == "l2")
        found.append(logits_on_cpu(model, batch))
    for number, one in enumerate(found):  # no option does nothing, and no two do the same
        assert all(float((one - other).abs().max()) > 1e-7 for other in found[:number]), number


@pytest.mark.parametrize("cure", ["none", "uniform_loss"])
def test_without_a_layer_the_model_stays_as_it_is(origins: dict[str, Origin], cure: str) -> None:
    model = made(origins["bert"])
    sentences.put_cure(model, replace(BASE, cure=cure, norm="l2"))
    assert not uc.attachments(model)
    assert not any(isinstance(module, L2Norm) for module in model.modules())


def rows(data: Data, part: str) -> list[tuple[int, ...]]:
    tokens = data.parts[part]
    return [tuple(tokens.ids[a:b].tolist()) for a, b in zip(tokens.starts, tokens.starts[1:], strict=False)]


def test_what_is_held_out_is_the_same_for_every_seed(origins: dict[str, Origin], runtime: Runtime) -> None:
    held = [sentences.load(replace(BASE, holdout=0.25, seed=seed), runtime, origins["bert"]) for seed in (0, 1)]
    assert {name: len(part) for name, part in held[0].parts.items()} == {"train": 36, "validation": 12, "dev": 16}
    assert rows(held[0], "validation") == rows(held[1], "validation")
    assert not set(rows(held[0], "validation")) & set(rows(held[0], "train"))
    assert held[0].fingerprint() == held[1].fingerprint()
    every = sentences.load(BASE, runtime, origins["bert"])
    assert sorted(rows(held[0], "train") + rows(held[0], "validation")) == sorted(rows(every, "train"))
    assert every.fingerprint() != held[0].fingerprint()


def test_some_of_the_examples(origins: dict[str, Origin], runtime: Runtime) -> None:
    few = sentences.load(replace(BASE, examples=10), runtime, origins["bert"])
    more = sentences.load(replace(BASE, examples=20), runtime, origins["bert"])
    assert len(few.parts["train"]) == 10
    assert rows(more, "train")[:10] == rows(few, "train")
    with pytest.raises(UsageError, match="48"):
        sentences.load(replace(BASE, examples=49), runtime, origins["bert"])
    with pytest.raises(UsageError, match="holdout"):
        sentences.load(replace(BASE, examples=4, holdout=0.1), runtime, origins["bert"])


def test_more_tokens_than_the_model_reads(origins: dict[str, Origin], runtime: Runtime) -> None:
    data = sentences.load(BASE, runtime, origins["bert"])
    with pytest.raises(UsageError, match="64"):
        sentences.check_length(data.tokenizer, made(origins["bert"]), replace(BASE, max_length=65))


def test_batches_depend_on_seed_and_epoch_alone(origins: dict[str, Origin], runtime: Runtime) -> None:
    data, model = sentences.load(BASE, runtime, origins["bert"]), made(origins["bert"])

    def drawn(seed: int, epoch: int) -> list[list[int]]:
        return [n.tolist() for n in Training(model, replace(BASE, seed=seed), data).batches(epoch).numbers]

    assert drawn(0, 1) == drawn(0, 1)
    assert all(drawn(0, 1) != other for other in (drawn(0, 2), drawn(1, 1)))
    assert sorted(n for batch in drawn(3, 2) for n in batch) == list(range(48))
    made_ready = list(Training(model, BASE, data).batches(1))
    assert len(made_ready) == len(Training(model, BASE, data).batches(1)) == 6
    assert all(set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"} for batch in made_ready)


@pytest.mark.parametrize("on", ["tokens", "pooled", "features"])
def test_the_uniformity_loss_is_added_with_its_weight(origins: dict[str, Origin], runtime: Runtime, on: str) -> None:
    model, data = made(origins["bert"]), sentences.load(BASE, runtime, origins["bert"])
    batch = data.parts["train"].batch(torch.arange(5))
    config = replace(BASE, cure="uniform_loss", uniform_on=on, weight=0.3, temperature=0.5)
    with Training(model, config, data) as task, torch.no_grad():
        found = float(task.loss(model, batch))
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.no_grad():
        out: Any = model(**given, output_hidden_states=True)
    entropy = float(F.cross_entropy(out.logits, batch["labels"]))
    expected = entropy + 0.3 * uniformity(model, out.hidden_states[-1], batch["attention_mask"], on)
    assert found == pytest.approx(expected, rel=1e-5)


def uniformity(model: nn.Module, last: Tensor, mask: Tensor, on: str) -> float:
    """Eq. 3 at the temperature 0.5, in loops."""

    def each(matrix: Tensor) -> list[float]:
        unit = [row / row.norm() for row in matrix.double()]
        return [math.log(sum(math.exp(float(u @ v) / 0.5) for v in unit)) for u in unit]

    if on != "tokens":
        pooled: Tensor = model.get_submodule("bert.pooler")(last).detach()
        if on == "features":  # of one example with each other: the call that is commented out in the released code
            rows = F.normalize(pooled.double(), dim=-1).tolist()
            return sum(math.log(sum(math.exp(a * b / 0.5) for b in row)) for row in rows for a in row)
        return sum(each(pooled))
    means = [each(tokens[real.bool()]) for tokens, real in zip(last, mask, strict=True)]
    return sum(sum(mean) / len(mean) for mean in means) / len(means)


def test_logits_come_in_the_order_of_the_examples(origins: dict[str, Origin], runtime: Runtime) -> None:
    model, data = made(origins["bert"]), sentences.load(BASE, runtime, origins["bert"])
    dev = data.parts["dev"]
    alone = torch.cat([logits_on_cpu(model, dev.batch(torch.tensor([n]))) for n in range(len(dev))])
    found = sentence_training.predict_logits(model, dev, replace(BASE, batch=3))
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_weight_decay_leaves_norms_and_biases_alone(origins: dict[str, Origin]) -> None:
    model = made(origins["bert"])
    decayed, free = sentence_training.build_optimizer(model, replace(BASE, weight_decay=0.1)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert all(names[id(p)].endswith("bias") or "LayerNorm" in names[id(p)] for p in free["params"])
    assert not any(names[id(p)].endswith("bias") or "LayerNorm" in names[id(p)] for p in decayed["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(names)


def test_the_main_figure_is_called_as_its_part() -> None:
    assert sentence_training.prefix_metrics("dev", {"f1": 0.5, "accuracy": 0.25}) == {"dev": 0.5, "dev_accuracy": 0.25}


def test_batches_as_published_where_padding_counts(runtime: Runtime, origins: dict[str, Origin]) -> None:
    """At random and filled up to a multiple of 8, as the published code has them; else there is little to count."""
    data, chosen = sentences.load(BASE, runtime, origins["bert"]), replace(BASE, padding="counted", batch=8)
    training = Training(made(origins["bert"]), chosen, data)
    first, again, second = ([batch["input_ids"] for batch in training.batches(epoch)] for epoch in (1, 1, 2))
    assert all(ids.shape[1] % 8 == 0 for ids in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    bucketed = Training(made(origins["bert"]), replace(chosen, padding="masked"), data).batches(1)
    assert sum(ids.numel() for ids in first) > sum(batch["input_ids"].numel() for batch in bucketed)


def test_what_a_dead_model_has(runtime: Runtime, origins: dict[str, Origin]) -> None:
    dev = sentences.load(BASE, runtime, origins["bert"]).parts["dev"]
    uneven = replace(dev, labels=torch.tensor([1, 1, 1, 0] * (len(dev) // 4)))
    assert sentence_training.constant_baseline(uneven, glue.TASKS["sst2"]) == 0.75
    assert sentence_training.constant_baseline(uneven, glue.TASKS["cola"]) == 0.0  # Matthews' correlation of a constant
    assert sentence_training.constant_baseline(uneven, glue.TASKS["mrpc"]) == pytest.approx(6 / 7)
    assert sentence_training.constant_baseline(uneven, glue.TASKS["stsb"]) == 0.0


def test_one_step_is_refused(runtime: Runtime, origins: dict[str, Origin]) -> None:
    data = sentences.load(BASE, runtime, origins["bert"])
    few = Training(made(origins["bert"]), replace(BASE, epochs=1, batch=1000), data)
    with pytest.raises(UsageError, match="one step"), few:
        pass


def test_presets_of_the_paper_train_as_its_script(
    runtime: Runtime, origins: dict[str, Origin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' AdamW and linear schedule, batches of 8 in the order of the development set."""
    model, data = made(origins["bert"]), sentences.load(BASE, runtime, origins["bert"])
    preset = RECIPES["glue"].presets["paper-bert"] | {"task": "sst2", "max_length": 64, "batch": 16, "epochs": 2}
    chosen = Config(**preset)
    with Training(model, chosen, data) as task:
        steps = 2 * math.ceil(len(data.parts["train"]) / 16)
        assert task.schedule is not None
        assert [task.schedule(k) for k in range(steps)] == pytest.approx([(steps - k) / steps for k in range(steps)])
        assert {group["eps"] for group in task.optimizer.param_groups} == {1e-6}
    dev, seen = data.parts["dev"], list[Tensor]()
    monkeypatch.setattr(
        sentence_training, "logits_on_cpu", lambda model, batch: seen.append(batch["input_ids"]) or torch.zeros(8, 2)
    )
    sentence_training.predict_logits(model, dev, chosen)
    numbers = torch.arange(len(dev)).split(8)
    expected = [dev.batch(each, 8 * math.ceil(int(dev.lengths[each].max()) / 8))["input_ids"] for each in numbers]
    assert all(torch.equal(ids, other) for ids, other in zip(seen, expected, strict=True))


def test_presets_have_the_formula_of_their_architecture() -> None:
    """(1 + s)x − s·m for BERT, x − s·m for ALBERT, over features for the second version; place 7 or BERT's."""
    presets = {name: Config(**RECIPES["glue"].presets[f"paper-{name}"]) for name in ("bert", "albert", "v2")}
    found = {name: (preset.identity, preset.axis, preset.at, preset.lr) for name, preset in presets.items()}
    assert found == {
        "bert": (True, "tokens", "attention.residual", 2e-5),
        "albert": (False, "tokens", "attention.residual", 2e-5),
        "v2": (True, "features", "attention.residual", 4e-5),
    }
    assert {(preset.eps, preset.evaluation_batch, preset.schedule) for preset in presets.values()} == {
        (1e-6, 8, "transformers")
    }


def test_a_model_with_a_cure_is_no_start(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "kept")
    model = load_classifier(Origin(str(folder)), 2)
    uc.attach(model, "contra_norm", scale=0.1)
    uc.save_cure(model, folder)
    with pytest.raises(UsageError, match="cure"):
        sentences.find_start(Config(model=str(folder)))


def test_settings_of_another_cure_make_no_other_run() -> None:
    plain = Config(cure="none")
    assert Config(cure="none", scale=0.3, norm="l2", temperature=0.5, uniform_on="pooled") == plain
    assert Config(cure="uniform_loss", scale=0.3, at="3") == Config(cure="uniform_loss")
    assert Config(cure="uniform_loss", temperature=0.5) != Config(cure="uniform_loss")
    assert Config(scale=0.3, weight=2.0) == Config(scale=0.3) != Config()
    assert Config(cure="none", padding="counted") != plain  # it makes other batches
    assert Config(evaluation_batch=8) == Config() != Config(padding="counted", evaluation_batch=8)
