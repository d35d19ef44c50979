"""The recipe of ogbn-arxiv: labels as inputs, the losses against loops, teacher and student, and the table."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.cures import ContraNorm
from uncollapse.errors import UsageError
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.arxiv.config import Config, data_fingerprint, load
from uncollapse.lab.experiments.arxiv.recipe import (
    RECIPE,
    _task,
    distillation_loss,
    draw_inputs,
    predict,
    robust_cross_entropy,
    run,
    train,
)
from uncollapse.lab.tables import markdown
from uncollapse.lab.tables.paper_table import build_cells

for library in ("torch_geometric", "accelerate"):
    pytest.importorskip(library)
TINY = Config(nodes=180, layers=3, hidden=4, epochs=3, teacher_epochs=2, warmup=2)
NO_EDGES = torch.zeros(2, 0, dtype=torch.long)


class Spy(nn.Module):
    """A model that records its inputs; its logits are a fixed function of them."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(features + classes, classes)
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.inputs.append(x.detach().clone())
        out: Tensor = self.linear(x)
        return out


def nodes(count: int = 50, features: int = 3, classes: int = 5) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    y = torch.cat([torch.arange(classes), torch.randint(classes, (count - classes,), generator=source)])
    return torch.randn(count, features, generator=source), y


def test_the_defaults_are_the_published_protocol() -> None:
    config = Config(**RECIPE.preset("paper"))
    network = {"layers": 2, "hidden": 256, "heads": 3, "dropout": 0.75, "input_drop": 0.25, "edge_drop": 0.3}
    cure = {"norm": "contra_norm_features", "scale": 1.0, "temperature": 1.0}
    training = {"lr": 2e-3, "warmup": 50, "epochs": 1000, "teacher_epochs": 2000, "label_rate": 0.5, "label_passes": 1}
    distilled = {"distill": 0.95, "distill_temperature": 0.7, "data": "arxiv"}
    wanted = network | cure | training | distilled
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_label_that_is_predicted_is_never_an_input(passes: int) -> None:
    x, y = nodes()
    train = torch.arange(len(y)) < 30
    torch.manual_seed(2)
    known = draw_inputs(train, 0.5)
    other = torch.where(known, y, (y + 1) % 5)  # every label that is not known is another one
    seen = []
    for labels in (y, other):
        spy = Spy(3, 5)
        predict(spy, x, NO_EDGES, labels, known, passes)
        seen.append(torch.stack(spy.inputs))
    assert torch.equal(*seen)
    assert len(seen[0]) == passes + 1
    first, last = seen[0][0], seen[0][-1]
    assert torch.equal(first[:, :3], x)
    assert torch.equal(first[:, 3:], F.one_hot(y, 5) * known[:, None])
    assert torch.equal(last[known], first[known])
    if passes:
        assert torch.allclose(last[~known, 3:].sum(1), torch.ones(int((~known).sum())))


def test_the_last_pass_alone_has_gradients_and_reads_the_predictions_before() -> None:
    x, y = nodes()
    known = torch.arange(len(y)) < 10
    spy = Spy(3, 5)
    logits = predict(spy, x, NO_EDGES, y, known, 1)
    once = spy.linear(spy.inputs[0]).softmax(1)
    assert torch.allclose(spy.inputs[1][~known, 3:], once[~known])
    logits.sum().backward()
    alone = Spy(3, 5)
    alone.linear(spy.inputs[1]).sum().backward()
    assert spy.linear.weight.grad is not None
    assert alone.linear.weight.grad is not None
    assert torch.allclose(spy.linear.weight.grad, alone.linear.weight.grad)


def test_inputs_are_some_training_labels_and_never_all() -> None:
    train = torch.arange(1000) < 600
    torch.manual_seed(0)
    drawn = torch.stack([draw_inputs(train, 0.3) for _ in range(50)])
    assert not bool((drawn & ~train).any())
    assert float(drawn[:, :600].float().mean()) == pytest.approx(0.3, abs=0.01)
    single = torch.arange(9) == 4
    assert not any(bool(draw_inputs(single, 0.99).any()) for _ in range(50))


def test_the_loss_is_of_training_nodes_that_are_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = load(TINY, Runtime())
    known = graph.train & (torch.arange(len(graph.y)) % 2 == 0)
    monkeypatch.setattr("uncollapse.lab.experiments.arxiv.recipe.draw_inputs", lambda train, rate: known)
    model = Spy(graph.x.shape[1], graph.classes)
    task = _task(model, graph, TINY, None)
    (batch,) = task.batches(1)
    loss = task.loss(model, batch).item()
    logits = predict(model, graph.x, graph.edge_index, graph.y, known, 1)
    asked = graph.train & ~known
    assert loss == pytest.approx(robust_cross_entropy(logits[asked], graph.y[asked]).item())
    teacher = torch.randn(len(graph.y), graph.classes)
    taught = _task(model, graph, TINY, teacher)
    (batch,) = taught.batches(1)
    expected = 0.05 * loss + 0.95 * distillation_loss(logits, teacher, 0.7).item()
    assert taught.loss(model, batch).item() == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_distillation_against_loops(temperature: float) -> None:
    source = torch.Generator().manual_seed(3)
    student, teacher = (4 * torch.randn(6, 4, generator=source, dtype=torch.float64) for _ in range(2))
    total = 0.0
    for ours, theirs in zip(student.tolist(), teacher.tolist(), strict=True):
        q, p = ([math.exp(z / temperature) for z in row] for row in (ours, theirs))
        q, p = ([value / sum(row) for value in row] for row in (q, p))
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    expected = temperature**2 * total / (6 * 4)  # the mean over nodes and classes
    assert float(distillation_loss(student, teacher, temperature)) == pytest.approx(expected, rel=1e-12)
    assert float(distillation_loss(teacher, teacher, temperature)) == pytest.approx(0.0, abs=1e-12)
    sure = 1e4 * torch.eye(4, dtype=torch.float64)
    assert bool(distillation_loss(sure, sure.flip(0), temperature).isfinite())


def test_the_robust_cross_entropy_against_loops() -> None:
    source = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(7, 5, generator=source, dtype=torch.float64)
    y = torch.arange(7) % 5
    epsilon = 1 - math.log(2)
    values = []
    for row, label in zip(logits.tolist(), y.tolist(), strict=True):
        cross = math.log(sum(math.exp(z) for z in row)) - row[label]
        values.append(math.log(epsilon + cross) - math.log(epsilon))
    assert float(robust_cross_entropy(logits, y)) == pytest.approx(sum(values) / 7, rel=1e-12)
    assert float(robust_cross_entropy(1e4 * F.one_hot(y, 5).double(), y)) == pytest.approx(0.0, abs=1e-12)


def test_the_learning_rate_rises_and_stays() -> None:
    graph = load(TINY, Runtime())
    for warmup, expected in ((4, [0.25, 0.5, 0.75, 1.0, 1.0]), (0, [1.0] * 5)):
        schedule = _task(Spy(1, 1), graph, replace(TINY, warmup=warmup), None).schedule
        assert schedule is not None
        assert [schedule(step) for step in range(5)] == expected


def test_the_record_has_teacher_and_student() -> None:
    model, record = train(TINY)
    assert not model.training
    assert json.loads(json.dumps(record)) == record
    assert Config(**record["config"]) == TINY
    assert record["figures"].keys() == {"validation", "test", "epoch", "teacher_validation", "teacher_test"}
    assert [entry["epoch"] for entry in record["epochs"]] == [1, 2, 3]
    best = min(record["epochs"], key=lambda entry: entry["validation_loss"])
    assert record["figures"]["epoch"] == best["epoch"]
    assert record["figures"]["validation"] == pytest.approx(best["validation"], abs=1e-6)
    layers = record["diagnosis"]["after"]["layers"]
    assert [layer["name"] for layer in layers] == ["norms.0", "norms.1"]
    assert "dirichlet_energy" in layers[0]


def test_both_students_of_a_seed_have_the_same_teacher() -> None:
    ours, plain = (run(replace(TINY, norm=norm)) for norm in ("contra_norm_features", "none"))
    for split in ("validation", "test"):
        assert ours["figures"][f"teacher_{split}"] == plain["figures"][f"teacher_{split}"]
    assert ours["epochs"] != plain["epochs"]
    again = run(replace(TINY, norm="none"))
    assert (again["figures"], again["epochs"]) == (plain["figures"], plain["epochs"])


def test_without_a_teacher_the_network_learns_from_labels_alone() -> None:
    alone = replace(TINY, teacher_epochs=0, norm="none", epochs=2)
    assert (alone.distill, replace(alone, distill=0.1)) == (0.95, alone)
    record = run(alone)
    assert record["figures"].keys() == {"validation", "test", "epoch"}
    teacher = run(replace(TINY, norm="none"))["figures"]  # trained just as this one
    assert record["figures"]["test"] == teacher["teacher_test"]


def test_an_interrupted_student_resumes_with_the_same_teacher(tmp_path: Path) -> None:
    def stop(step: int, total: int, losses: Any = None, *more: Any) -> None:
        if total == config.epochs and step >= 5:
            raise KeyboardInterrupt

    config = replace(TINY, epochs=8, teacher_epochs=3)
    runtime = Runtime(checkpoints=tmp_path / "run", save_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        run(config, replace(runtime, progress=stop))
    assert list(tmp_path.glob("run/teacher/step-*"))
    resumed, whole = run(config, runtime), run(config)
    assert (resumed["figures"], resumed["epochs"]) == (whole["figures"], whole["epochs"])
    assert not list(tmp_path.glob("run/teacher/step-*"))


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_features_from_a_file(tmp_path: Path, suffix: str) -> None:
    config = replace(TINY, features=f"giant{suffix}")
    x = torch.randn(180, 6)
    if suffix == ".npy":
        numpy.save(tmp_path / config.features, x.numpy())
    else:
        torch.save(x, tmp_path / config.features)
    runtime = Runtime(data_root=tmp_path)
    graph, own = load(config, runtime), load(TINY, runtime)
    assert torch.equal(graph.x, x)
    assert torch.equal(graph.edge_index, own.edge_index)
    assert data_fingerprint(config, runtime) == graph.fingerprint() != own.fingerprint()
    assert data_fingerprint(TINY, runtime) is None
    with pytest.raises(UsageError, match="per node"):
        load(replace(config, features=f"missing{suffix}"), runtime)


def test_the_table_has_the_published_numbers_and_says_command_only() -> None:
    table = RECIPE.tables["accuracy"]
    found = {tuple(number.cell.values()): (number.mean, number.std) for number in table.published}
    assert found == {("arxiv", "none", 2): (76.15, 0.10), ("arxiv", "contra_norm_features", 2): (76.36, 0.13)}
    config = {**vars(TINY), "layers": 2}
    records = [{"config": config, "seed": 0, "figures": {"test": 0.5, "validation": 0.5}}]
    cells = {(cell.group, cell.row): cell for cell in build_cells(table, records)}
    assert cells["arxiv_like", "contra_norm_features"].run
    assert not cells["arxiv", "contra_norm_features"].run
    shown = markdown.to_markdown(table, records)
    assert shown.count("| command only<br>paper 76.") == 2
    assert "- arxiv, command only: uncollapse sweep arxiv --grid paper" in shown
    run_there = [*records, records[0] | {"config": {**vars(Config(**RECIPE.preset("paper")))}}]
    assert "- arxiv, command only" not in markdown.to_markdown(table, run_there)


def test_d_contra_norm_is_the_identity_where_nodes_are_many_times_its_features() -> None:
    def change(nodes: int, temperature: float) -> float:
        x = torch.randn(nodes, 16, generator=torch.Generator().manual_seed(0))
        moved = ContraNorm.preset("arxiv", 16, 1.0, temperature=temperature)(x) - x
        return float(moved.norm() / x.norm())

    assert change(32, 1.0) > 0.5
    assert change(1600, 1.0) < 1e-6
    assert change(1600, 100.0) > 0.5


def test_settings_without_effect_make_no_other_run() -> None:
    plain = Config(norm="none")
    assert Config(norm="none", scale=0.3, temperature=2.0) == plain
    assert Config(data="cora", nodes=500) == Config(data="cora")
    with pytest.raises(UsageError, match="even"):
        Config(layers=3, hidden=5)


def test_names_of_runs() -> None:
    assert RECIPE.name_of(Config(seed=3)) == "arxiv_like-contra_norm_features-s1-L2-seed3"
    assert RECIPE.name_of(Config(norm="none", layers=5)) == "arxiv_like-none-L5-seed0"
