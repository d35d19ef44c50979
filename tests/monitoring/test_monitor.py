"""The monitor in a plain loop: what is due, curves, rules, the folder, cost, and a training that is not changed."""

import copy
import json
import random
import sys
import time
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import uncollapse as uc
from uncollapse.backbones import forward
from uncollapse.cli.app import app
from uncollapse.diagnosis.stats import streaming
from uncollapse.errors import NotFiniteError
from uncollapse.monitoring import held_batches
from uncollapse.monitoring.monitor import CollapseWarning, Monitor, Rule
from uncollapse.pairwise import numerics

DIM = 16


def encoder(dropout: float = 0.0, layers: int = 3) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 32, dropout, batch_first=True), layers)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(8, 12, DIM, generator=torch.Generator().manual_seed(seed))


def collapse(model: nn.TransformerEncoder, block: int = -1) -> None:
    """One constant drowns all tokens of a block, and of those after it."""
    layer: Any = model.layers[block]
    with torch.no_grad():
        layer.linear2.bias.add_(torch.linspace(-100, 100, DIM))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "monitor.jsonl").read_text(encoding="utf-8").splitlines()]


def train(model: nn.Module, steps: int, watch: Callable[[nn.Module, int], object] = lambda model, step: None) -> None:
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    model.train()
    torch.manual_seed(1)
    for step in range(steps):
        x = torch.randn(4, 12, DIM)
        loss = F.mse_loss(model(x), x.roll(1, 1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        watch(model, step)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_measures_at_multiples_of_every_and_gives_what_diagnose_gives() -> None:
    model, monitor = encoder(), Monitor([batch()], every=3, measures=("effective_rank", "rank_share"))
    records = [monitor.step(model, step, epoch=step / 10) for step in range(8)]
    assert [record.step for record in records if record] == [0, 3, 6]
    record, direct = records[3], uc.diagnose(model, [batch()], plan=uc.Plan(baseline=0))
    assert record is not None
    assert record.epoch == 0.3
    assert list(record.curves) == ["effective_rank", "rank_share"]
    assert record.curves["rank_share"] == {layer.name: layer["rank_share"] for layer in direct.layers}
    assert record.diagnosis is not None
    assert record.diagnosis.verdict == direct.verdict


def test_measure_takes_any_step_once() -> None:
    model, monitor = encoder(), Monitor([batch()], every=None)
    assert monitor.step(model, 0) is None
    assert monitor.measure(model, 7) is not None
    assert monitor.measure(model, 7) is None
    with pytest.raises(ValueError, match="step 7"):
        monitor.measure(model, 3)


def test_training_is_the_same_bit_for_bit() -> None:
    bare, watched = encoder(dropout=0.3), encoder(dropout=0.3)
    train(bare, 6)
    loader = DataLoader(TensorDataset(torch.cat([batch(1), batch(2)])), 4, shuffle=True)
    states = torch.get_rng_state(), random.getstate()
    monitor = Monitor(loader, every=2, max_batches=2, call=lambda model, rows: model(rows[0] + 0 * torch.randn(1)))
    assert torch.equal(states[0], torch.get_rng_state())
    train(watched, 6, monitor.step)
    assert random.getstate() == states[1]
    assert same(bare, watched)
    assert monitor.cost.measurements == 3


def test_compiled_training_is_the_same_and_compiled_as_often() -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    counts, models = [], [encoder(dropout=0.3), encoder(dropout=0.3)]
    for model, watch in zip(models, (lambda model, step: None, Monitor([batch()], every=2).step), strict=True):
        torch.compiler.reset()
        train(torch.compile(model, backend=backend), 5, watch)
        counts.append(len(compiled))
    assert counts[1] == 2 * counts[0] > 0
    assert same(*models)


def test_wrappers_are_taken_off() -> None:
    model = encoder()
    inner = nn.DataParallel(torch.compile(model, backend="eager"))
    assert forward.unwrap(torch.compile(inner, backend="eager")) is model


def test_held_batches_stay_the_same_and_are_bounded() -> None:
    drawn = []

    def endless() -> Any:
        while True:
            drawn.append(1)
            yield torch.randn(4, 12, DIM)

    model, monitor = encoder(), Monitor(endless(), every=1)
    assert len(drawn) == 4
    first, second = (monitor.step(model, step) for step in (0, 1))
    assert first is not None
    assert second is not None
    assert first.curves == second.curves
    assert len(drawn) == 4


def test_held_batches_are_copies() -> None:
    class Encoding(UserDict[str, Tensor]):
        """As HuggingFace's, a mapping that is no dict."""

    def loader() -> Any:
        buffer, array = torch.zeros(2), np.zeros(2)
        for _ in range(3):
            buffer += 1
            array += 1
            yield Encoding(x=buffer), [(buffer, array)], "a"

    held = held_batches.hold_batches(loader(), 3)
    for number, (named, [(tensor, array)], word) in enumerate(held, 1):
        assert isinstance(named, Encoding)
        assert [named["x"][0], tensor[0], array[0], word] == [number, number, number, "a"]


def test_random_states_of_python_and_numpy_are_kept() -> None:
    def stir(x: Any) -> Any:
        return x + random.random() + np.random.rand()  # noqa: NPY002

    def states() -> Any:
        return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    monitor = Monitor((stir(batch()) for _ in range(2)), every=1, call=lambda model, x: model(stir(x)))
    monitor.step(encoder(), 0)
    assert states() == before


def test_rule_compares_with_the_first_measurement(tmp_path: Path) -> None:
    rules = [Rule("effective_rank", 1, falls_by=0.5, then="stop"), Rule("mean_cosine", 0, above=0.9)]
    model, monitor = (
        encoder(),
        Monitor([batch()], every=1, rules=rules, folder=tmp_path, labels=uc.Labels("tiny")),
    )
    monitor.step(model, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.json", "monitor.jsonl"]
    collapse(model, 1)
    with pytest.warns(CollapseWarning, match="effective_rank.*fell") as told:
        record = monitor.step(model, 1)
    assert told[0].filename == __file__
    assert record is not None
    assert record.stop
    assert monitor.should_stop
    assert monitor.met == {"effective_rank of block 1 falls by half, then stop": 1}
    first, collapsed = (uc.Diagnosis.load(tmp_path / name) for name in ("first.json", "collapse.json"))
    assert collapsed.layers[2]["effective_rank"] < first.layers[2]["effective_rank"] / 2
    assert collapsed.settings["monitor"]["step"] == 1
    assert collapsed.settings["monitor"]["met"] == list(record.met) == lines(tmp_path)[1]["met"]
    monitor.step(model, 2)  # a rule warns once
    assert lines(tmp_path)[2]["met"] == []


def test_compare_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = encoder()
    monitor = Monitor(
        [batch()],
        every=1,
        rules=[Rule("mean_cosine", "any", rises_by=0.1)],
        folder=tmp_path,
        labels=uc.Labels("tiny"),
    )
    monitor.step(model, 0)
    collapse(model)
    with pytest.warns(CollapseWarning, match="2 rose"):
        monitor.step(model, 1)
    result = CliRunner().invoke(app, ["compare", "first.json", "collapse.json"])
    assert result.exit_code == 0, result.output
    assert "tiny (first)" in result.stdout
    assert "tiny (collapse)" in result.stdout
    assert (tmp_path / "uncollapse-comparison.html").exists()


def test_patience_counts_measurements_in_a_row() -> None:
    healthy, ill = encoder(), encoder()
    collapse(ill)
    monitor = Monitor([batch()], every=1, rules=[Rule("mean_cosine", above=0.9, patience=2, then="stop")])
    for step, model in enumerate([healthy, ill, healthy, ill]):
        monitor.step(model, step)
        assert not monitor.should_stop
    with pytest.warns(CollapseWarning, match=r"block 2.*above"):
        monitor.step(ill, 4)
    assert monitor.should_stop


def test_save_is_called_with_the_step() -> None:
    saved: list[int] = []
    model, rule = encoder(), Rule("uniformity", above=-1e-3, then="save")
    monitor = Monitor([batch()], every=1, rules=[rule], save=saved.append)
    monitor.step(model, 0)
    collapse(model)
    with pytest.warns(CollapseWarning, match="uniformity"):
        record = monitor.step(model, 1)
    assert saved == [1]
    assert record is not None
    assert record.save
    assert not monitor.should_stop
    with pytest.raises(ValueError, match="pass save="):
        Monitor([batch()], rules=[rule]).step(model, 0)


def test_a_logger_that_fails_loses_nothing(tmp_path: Path) -> None:
    def broken(step: int, values: dict[str, float]) -> None:
        if step > 0:
            raise ConnectionError("no network")

    seen: list[int] = []
    log = [broken, lambda step, values: seen.append(step)]
    rules = [Rule("mean_cosine", above=0.9, then="stop")]
    model, monitor = encoder(), Monitor([batch()], every=1, rules=rules, folder=tmp_path, log=log)
    monitor.step(model, 0)
    collapse(model)
    with pytest.warns(CollapseWarning) as told:
        record = monitor.step(model, 1)
    assert [str(w.message).split(":")[1] for w in told] == [
        " mean_cosine of block 2 is above 0.9",
        " logger 1 of 2 failed. ConnectionError",
    ]
    assert {w.filename for w in told} == {__file__}
    assert record is not None
    assert record.stop
    assert monitor.should_stop
    assert (tmp_path / "collapse.json").exists()
    with warnings.catch_warnings(action="error"):
        monitor.step(model, 2)  # it is told once
    assert seen == [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


def test_an_alert_that_fails_is_reported_although_a_table_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement sends a table where a later one sends an alert."""

    class Tracker:
        def log(self, values: dict[str, Any], step: int) -> None:
            if "collapse/layers" in values:
                raise ConnectionError("no network for tables")

        def alert(self, title: str, text: str) -> None:
            raise ConnectionError("no network for alerts")

    library = ModuleType("trackio")
    monkeypatch.setattr(library, "Table", lambda columns, data: data, raising=False)
    monkeypatch.setitem(sys.modules, "trackio", library)
    monkeypatch.setattr(Tracker, "__module__", "trackio.run")
    rules = [Rule("mean_cosine", above=0.9)]
    model, monitor = encoder(), Monitor([batch()], every=1, rules=rules, log=Tracker())
    with pytest.warns(CollapseWarning, match="network"):
        monitor.step(model, 0)
    collapse(model)
    with pytest.warns(CollapseWarning, match="mean_cosine"), pytest.warns(match="alert"):
        monitor.step(model, 1)


def test_a_save_that_fails_is_called_again(tmp_path: Path) -> None:
    called: list[int] = []

    def save(step: int) -> None:
        called.append(step)
        if len(called) < 3:
            raise OSError("disk full")

    rules = [Rule("mean_cosine", above=0.9, then=then) for then in ("save", "stop")]
    model, monitor = encoder(), Monitor([batch()], every=1, rules=rules, folder=tmp_path, save=save)
    monitor.step(model, 0)
    collapse(model)
    with pytest.warns(CollapseWarning, match="mean_cosine"), pytest.warns(match="save failed"):
        monitor.step(model, 1)
    assert monitor.should_stop
    assert len(lines(tmp_path)[1]["met"]) == 1  # two rules, one condition
    with pytest.warns(CollapseWarning, match=r"save.*disk full"):
        monitor.step(model, 2)
    for step in (3, 4):
        monitor.step(model, step)
    assert called == [1, 2, 3]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_rule_is_not_used_up_by_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    model, monitor = encoder(), Monitor([batch()], every=1, rules=[Rule("mean_cosine", above=0.9, then="stop")])
    monitor.step(model, 0)
    collapse(model)
    (tmp_path / "file").touch()
    monitor.folder = tmp_path / "file"
    with pytest.raises(OSError, match="file"):
        monitor.step(model, 1)
    monitor.folder = tmp_path / "folder"
    with pytest.warns(CollapseWarning, match="Step 2"):
        monitor.step(model, 2)
    assert monitor.should_stop


def test_nan_is_told_and_the_training_goes_on(tmp_path: Path) -> None:
    model = encoder()
    rules = [Rule("mean_cosine", above=0.9, then="stop")]
    monitor = Monitor([batch()], every=1, rules=rules, folder=tmp_path)
    monitor.step(model, 0)
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        next(model.layers[1].parameters()).fill_(torch.nan)
    with pytest.warns(CollapseWarning, match="block 1"):
        record = monitor.step(model, 1)
    assert record is not None
    assert record.diagnosis is None
    monitor.step(model, 2)  # it is told once
    assert not monitor.should_stop
    model.load_state_dict(kept)
    monitor.step(model, 3)
    assert ["error" in line for line in lines(tmp_path)] == [False, True, True, False]
    assert not (tmp_path / "collapse.json").exists()


def test_finite_rule_stops_on_nan() -> None:
    model, monitor = encoder(), Monitor([batch()], every=1, rules=[Rule("finite", then="stop")])
    monitor.step(model, 0)
    with torch.no_grad():
        next(model.layers[1].parameters()).fill_(torch.inf)
    with pytest.warns(CollapseWarning, match="NaN") as told:
        monitor.step(model, 1)
    assert len(told) == 1
    assert monitor.should_stop


@pytest.mark.parametrize(
    "refuses",
    [
        lambda x: numerics.check_finite(x, "x"),
        lambda x: streaming.check_entries((x, None), 1e30),
        lambda x: streaming.read_tensor({"sum": x}, "sum", torch.float32, (2, 2)),
    ],
)
def test_finite_rule_knows_who_refuses_nan(refuses: Callable[[Tensor], None]) -> None:
    with pytest.raises(NotFiniteError) as told:
        refuses(torch.tensor([[1.0, torch.nan], [0.0, 1.0]]))
    outer = ValueError("At block 1")
    outer.__cause__ = told.value
    rule = Rule("finite")
    assert rule.check_error(outer) == "a layer holds NaN or infinite numbers (ValueError: At block 1)"
    assert rule.check_error(ValueError("x must be finite")) is None


def test_other_failures_are_no_collapse() -> None:
    broken = False

    def call(model: nn.Module, x: Tensor) -> Any:
        if broken:
            raise RuntimeError("out of memory, which is finite")
        return model(x)

    model, monitor = encoder(), Monitor([batch()], every=1, rules=[Rule("finite", then="stop")], call=call)
    monitor.step(model, 0)
    broken = True
    with pytest.warns(CollapseWarning, match="memory"):
        monitor.step(model, 1)
    assert not monitor.should_stop
    with pytest.raises(RuntimeError, match="memory"):  # at the first measurement nothing is lost
        Monitor([batch()], call=call).step(model, 0)


def test_a_run_goes_on_in_its_folder_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def run(folder: Path, monitor: Monitor, steps: range) -> None:
        for step in steps:
            model = encoder()
            if step >= 5:
                collapse(model)
            if step == 8:
                with pytest.warns(CollapseWarning, match="→"):
                    monitor.step(model, step)
            else:
                monitor.step(model, step)

    def new(folder: Path) -> Monitor:
        return Monitor(
            [batch()], every=2, rules=[Rule("effective_rank", falls_by=0.2, patience=2, then="stop")], folder=folder
        )

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, new(whole), range(10))
    run(parts, new(parts), range(8))  # killed after step 7; the checkpoint is that of step 4
    with (parts / "monitor.jsonl").open("a") as file:
        file.write('{"step": 8, "epo')
    resumed = new(parts)
    with pytest.warns(UserWarning, match="cut off"), pytest.warns(match=r"step 6.*dropped"):
        resumed.step(encoder(), 5)
    assert [line["step"] for line in lines(parts)] == [0, 2, 4]
    run(parts, resumed, range(6, 10))
    for one, other in zip(lines(whole), lines(parts), strict=True):
        for line in (one, other):
            del line["seconds"], line["state"]["seconds"], line["state"]["elapsed"]
        assert one == other
    assert resumed.should_stop
    assert resumed.cost.measurements == 5
    assert (parts / "collapse.json").exists()


def test_a_collapse_that_is_rolled_back_leaves_nothing(tmp_path: Path) -> None:
    model, ill = encoder(), encoder()
    collapse(ill)
    rules = [Rule("effective_rank", falls_by=0.2)]
    monitor = Monitor([batch()], every=1, rules=rules, folder=tmp_path)
    monitor.step(model, 0)
    monitor.step(model, 1)
    with pytest.warns(CollapseWarning):
        monitor.step(ill, 2)
    assert (tmp_path / "collapse.json").exists()
    with pytest.warns(UserWarning, match=r"step 2.*dropped"):
        Monitor([batch()], every=10, rules=rules, folder=tmp_path).step(model, 2)
    assert not (tmp_path / "collapse.json").exists()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


@pytest.mark.parametrize("start", [0, 1])
def test_another_run_in_the_folder_is_not_lost(tmp_path: Path, start: int) -> None:
    model = encoder()
    monitor = Monitor([batch()], every=1, folder=tmp_path)
    for step in (0, 1):
        monitor.step(model, step)
    before = (tmp_path / "monitor.jsonl").read_bytes()
    fresh = Monitor([batch()], every=1, folder=tmp_path)
    for _ in range(2):
        with pytest.raises(FileExistsError, match="overwrite=True"):
            fresh.step(model, start)
    assert (tmp_path / "monitor.jsonl").read_bytes() == before
    Monitor([batch()], every=1, folder=tmp_path, overwrite=True).step(model, start)
    assert [line["step"] for line in lines(tmp_path)] == [start]


def test_dropped_measurements_are_told(tmp_path: Path) -> None:
    model, monitor = encoder(), Monitor([batch()], every=1, folder=tmp_path)
    for step in range(4):
        monitor.step(model, step)
    with pytest.warns(UserWarning, match=r"step 3.*dropped"):
        Monitor([batch()], every=1, folder=tmp_path).step(model, 2)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_line_cut_within_a_character_is_dropped(tmp_path: Path, cut: int) -> None:
    model = encoder()
    monitor = Monitor([batch()], every=1, folder=tmp_path)
    for step in (0, 1):
        monitor.step(model, step)
    with (tmp_path / "monitor.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "met": ["8 ' + "→".encode()[:cut])
    with pytest.warns(UserWarning, match="cut off"):
        Monitor([batch()], every=1, folder=tmp_path).step(model, 2)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "collapse.json").write_text("mine")
    Monitor([batch()], every=1, folder=tmp_path).step(encoder(), 0)
    assert (tmp_path / "collapse.json").read_text() == "mine"


def test_a_run_of_another_model_is_not_taken_up(tmp_path: Path) -> None:
    Monitor([batch()], every=1, folder=tmp_path).step(encoder(), 0)
    with pytest.raises(ValueError, match="block 3"):
        Monitor([batch()], every=1, folder=tmp_path).step(encoder(layers=4), 5)


def test_damage_in_the_middle_is_told(tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl").write_text('{"step": 0\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        Monitor([batch()], every=1, folder=tmp_path).step(encoder(), 5)


def test_state_goes_through_a_checkpoint(tmp_path: Path) -> None:
    rules = [Rule("effective_rank", falls_by=0.2, patience=2)]
    model, monitor = encoder(), Monitor([batch()], every=1, rules=rules, folder=tmp_path / "a")
    monitor.step(model, 0)
    collapse(model)
    monitor.step(model, 1)
    torch.save(monitor.state_dict(), tmp_path / "state.pt")
    with pytest.warns(CollapseWarning):
        monitor.step(model, 2)
    for folder, kept in ((tmp_path / "a", [0, 1, 2]), (None, [])):
        resumed = Monitor([batch()], every=1, rules=rules, folder=folder)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
        with pytest.warns(CollapseWarning, match="2 fell"):
            resumed.step(model, 2)
        assert resumed.cost.measurements == 3
        assert folder is None or [line["step"] for line in lines(folder)] == kept


def test_cost_is_told_and_bounded() -> None:
    model, monitor = encoder(), Monitor([batch()], every=1, max_share=0.2)
    assert monitor.cost.share == 0
    record = monitor.step(model, 0)
    assert record is not None
    assert monitor.cost.seconds == record.seconds > 0
    assert monitor.step(model, 1) is None  # so far there was nothing but measuring
    assert monitor.cost.skipped == 1
    time.sleep(record.seconds * 5)
    assert monitor.step(model, 2) is not None
    cost = monitor.cost
    assert 0 < cost.share < 1
    assert str(cost).startswith("2 measurements in ")
    assert str(cost).endswith("% of the time, 1 skipped")


def test_a_second_start_keeps_the_time() -> None:
    model, monitor = encoder(), Monitor([batch()], every=1)
    for start in (False, True):
        for step in range(3):
            monitor.visit(model, step + 3 * start, done=3 * start, due=True, start=start and step == 0)
    cost = monitor.cost
    assert cost.measurements == 6
    assert 0 < cost.share <= 1


class Run:
    """What a run of Weights & Biases looks like."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.seen.append((step, data))


def test_loggers(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, calls = Run(), []
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        log = [writer, run, lambda step, values: calls.append((step, values))]
        monitor = Monitor([batch()], every=5, measures=("effective_rank",), at=("attention.residual",), log=log)
        record = monitor.step(encoder(layers=2), 5)
    assert record is not None
    assert record.diagnosis is not None
    assert calls == run.seen
    [(step, values)] = calls
    assert step == 5
    assert list(values) == [
        *(f"collapse/effective_rank/{name}" for name in ("embed", "block_00", "block_01")),
        *(f"collapse/effective_rank/{name}_attention.residual" for name in ("block_00", "block_01")),
        "collapse/lowest_effective_rank",
        "collapse/verdict",
        "collapse/rules_met",
    ]
    assert values["collapse/lowest_effective_rank"] == min(
        layer["effective_rank"] for layer in record.diagnosis.layers if layer.place == "block"
    )
    read = events.EventAccumulator(str(tmp_path)).Reload()
    assert set(read.Tags()["scalars"]) == set(values)
    [point] = read.Scalars("collapse/effective_rank/block_01")
    assert (point.step, point.value) == (5, pytest.approx(values["collapse/effective_rank/block_01"]))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"every": 0}, "every must be at least 1"),
        (
            {"measures": ("rank",)},
            r"No measure is named 'rank'. Did you mean 'effective_rank'\? There are: mean_cosine",
        ),
        ({"max_share": 0}, "max_share is a share"),
        ({"max_batches": 0}, "max_batches must be at least 1"),
        ({"log": 3}, "log takes a SummaryWriter.* got int"),
        ({"rules": [Rule("uniformity", above=-1), Rule("uniformity", above=-1)]}, "given twice"),
        ({"batches": torch.zeros(2, 3)}, r"got one Tensor; pass \[batch\]"),
        ({"batches": {"x": 1}}, r"got one dict; pass \[batch\]"),
        ({"batches": []}, "no batches"),
    ],
)
def test_mistakes_are_told_when_it_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Monitor(**{"batches": [batch()], **options})


def test_unknown_option_of_diagnose() -> None:
    with pytest.raises(TypeError, match="'pairs'"):
        Monitor([batch()], pairs=[])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"measure": "rank", "above": 1},
            r"No measure is named 'rank'. Did you mean 'effective_rank'\? There are: mean_cosine",
        ),
        ({"measure": "mean_cosine"}, "exactly one of above, below, falls_by and rises_by, got none"),
        ({"measure": "mean_cosine", "above": 0.5, "below": 0.6}, "got above, below"),
        ({"measure": "mean_cosine", "above": 1.0}, "can never be met"),
        ({"measure": "effective_rank", "below": 0}, "can never be met"),
        ({"measure": "effective_rank", "falls_by": 50}, "can never be met"),
        ({"measure": "uniformity", "falls_by": -0.5}, "must be positive"),
        ({"measure": "uniformity", "above": float("nan")}, "finite number"),
        ({"measure": "uniformity", "above": -1, "then": "halt"}, "warn, stop, save, got 'halt'"),
        ({"measure": "uniformity", "above": -1, "patience": 0}, "patience must be at least 1"),
        ({"measure": "finite", "above": 1}, "no limit"),
    ],
)
def test_mistakes_in_rules(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Rule(**given)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rules": [Rule("mean_cosine", 9, above=0.5)]}, "no such layer. There are: embed, block 0, block 1, block 2"),
        ({"rules": [Rule("mean_cosine", "block nine", above=0.5)]}, "no such layer"),
        (
            {"rules": [Rule("mean_cosine", 0, above=0.5)], "layers": "last 2"},
            "no such layer. There are: block 1, block 2",
        ),
        ({"rules": [Rule("mean_cosine", place="mlp.residual", above=0.5)]}, "only at: block. Pass at"),
        ({"rules": [Rule("attention_std", below=0.5)]}, "not taken there. There are: .*mean_cosine"),
        ({"measures": ("attention_std",)}, "'attention_std', which was not taken in TransformerEncoder"),
        ({"part": "tower"}, "part 'tower'"),
    ],
)
def test_what_does_not_fit_the_model_is_told_at_the_first_measurement(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        Monitor([batch()], every=1, folder=tmp_path, **options).step(encoder(), 0)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("ends", [[], ["final"]], ids=["without a norm", "with a norm after the last block"])
def test_layers_of_rules(ends: list[str]) -> None:
    model = encoder()
    model.norm = nn.LayerNorm(model.layers[0].norm1.weight.shape[0]) if ends else None
    layers = uc.diagnose(model, [batch()], plan=uc.Plan(baseline=0), at=("block", "attention.residual")).layers

    def names(layer: int | str, **more: Any) -> list[str]:
        return [found.name for found in Rule("mean_cosine", layer, above=0.5, **more).select(layers)]

    assert names("last") == names(-1) == names(2) == names("block 2") == ["block 2"]
    assert names("embed") == ["embed"]
    assert names("any") == ["embed", "block 0", "block 1", "block 2", *ends]
    assert names("any", place="attention.residual") == ["block 0", "block 1", "block 2"]


@pytest.mark.parametrize(
    ("limit", "first", "value", "met"),
    [
        ({"falls_by": 0.5}, 8.0, 4.0, True),
        ({"falls_by": 0.5}, 8.0, 4.1, False),
        ({"rises_by": 0.5}, -3.0, -1.5, True),  # uniformity grows worse
        ({"rises_by": 0.5}, -3.0, -1.6, False),
        ({"falls_by": 0.5}, -3.0, -4.5, True),
        ({"falls_by": 0.5}, 0.0, 0.0, False),
        ({"rises_by": 0.5}, 0.0, 0.1, True),
        ({"above": -1.5}, -3.0, -1.4, True),
        ({"above": -1.5}, -3.0, -1.5, False),
        ({"below": -1.5}, -1.0, -1.6, True),
    ],
)
def test_limits(limit: dict[str, float], first: float, value: float, met: bool) -> None:
    layer = uc.diagnose(encoder(), [batch()], plan=uc.Plan(baseline=0)).layers[-1]
    summary = type(layer.measures["uniformity"])(value)
    layer = type(layer)(**(asdict(layer) | {"measures": {"uniformity": summary, "effective_rank": summary}}))
    measure = "uniformity"
    told = Rule(measure, **limit).check([layer], {layer.name: {measure: first}})
    assert (told is not None) == met


def test_rules_speak() -> None:
    assert str(Rule("effective_rank", 9, falls_by=0.25)) == "effective_rank of block 9 falls by 25%"
    assert (
        str(Rule("uniformity", "any", above=-1.5, patience=3))
        == "uniformity of any layer is above -1.5, 3 times in a row"
    )
    assert str(Rule("mean_cosine", place="mlp.residual", rises_by=0.5)) == (
        "mean_cosine of the last block mlp.residual rises by half"
    )


def fake_tracker(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A library such as Trackio, whose run logs, alerts and shows tables."""
    library: Any = ModuleType(name)
    library.seen, library.alerts = [], []
    library.Table = lambda columns, data: {"columns": columns, "data": data}
    library.log = lambda values, step: library.seen.append((step, values))
    library.alert = lambda title, text: library.alerts.append((title, text))
    monkeypatch.setitem(sys.modules, name, library)
    return library


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_get_a_table_at_the_start_and_an_alert_where_a_rule_is_met(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    library = fake_tracker(monkeypatch, name)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    monitor = uc.Monitor([torch.randn(4, 8, 32)], every=1, log=library, rules=[uc.Rule("effective_rank", below=30)])
    with pytest.warns(uc.CollapseWarning):
        record = monitor.step(model, 0)
    monitor.step(model, 1)
    assert library.alerts == [("Collapse", record.met[0])]
    tables = [(step, values["collapse/layers"]) for step, values in library.seen if "collapse/layers" in values]
    assert [step for step, _ in tables] == [0]
    assert tables[0][1]["columns"][:2] == ["layer", "mean_cosine"]
    assert [row[0] for row in tables[0][1]["data"]] == ["embed", "block 0", "block 1"]


def test_an_alert_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    library = fake_tracker(monkeypatch, "trackio")
    library.alert = lambda title, text: 1 / 0
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    monitor = uc.Monitor([torch.randn(4, 8, 32)], every=1, log=[library], rules=[uc.Rule("effective_rank", below=30)])
    with pytest.warns(uc.CollapseWarning, match="ZeroDivisionError"):
        assert monitor.step(model, 0) is not None


def test_an_early_alarm_stops_a_collapsed_model_in_its_window() -> None:
    model = encoder()
    monitor = Monitor.early([batch()], steps=100)
    assert [str(rule) for rule in monitor.rules] == [
        "rank_share of the last hidden block is below 0.25, from step 4 to 5",
        "robust_cosine of the last hidden block is above 0.9999, from step 4 to 5",
    ]
    healthy, broken = Monitor.early([batch()], steps=100), encoder()
    for _ in range(10):
        collapse(broken)
    with pytest.warns(CollapseWarning, match="robust_cosine.*above"):
        stops = [(monitor.step(broken, step), monitor.should_stop)[1] for step in range(7)]
    assert stops == [False] * 5 + [True] * 2  # it was collapsed from step 0 on
    assert not any((healthy.step(model, step), healthy.should_stop)[1] for step in range(7))
    late = Monitor([batch()], every=10, rules=Rule.early(100))
    late.step(broken, 10)
    assert not late.should_stop
    with pytest.raises(ValueError, match="whole training"):
        Rule.early(5)
    with pytest.raises(ValueError, match="window"):
        Rule("rank_share", below=0.2, steps=(5, 4))


def test_the_last_hidden_block_does_not_narrow() -> None:
    layer = uc.diagnose_activations([torch.randn(2, 8, 16)] * 4 + [torch.randn(2, 8, 3)]).layers
    assert [found.name for found in Rule("rank_share", "last hidden", below=0.5).select(layer)] == ["layer 3"]
    assert [found.name for found in Rule("rank_share", "last hidden", below=0.5).select(layer[:4])] == ["layer 3"]
