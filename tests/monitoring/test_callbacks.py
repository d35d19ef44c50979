"""The monitor in the trainers of others: HuggingFace, Lightning, and a loop over one graph as in PyG's examples."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from uncollapse.backbones import torchvision_ops
from uncollapse.monitoring.monitor import CollapseWarning, Monitor, Rule

torchvision_ops.declare()
transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning.pytorch")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 30}
ALIKE = {"above": -1e-9}  # of uniformity: never met while tokens differ at all
MET = {"above": -100.0}  # of uniformity: always met


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines without what differs from run to run."""
    found = [json.loads(line) for line in (folder / "monitor.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in found:
        del line["seconds"], line["state"]["seconds"], line["state"]["elapsed"]
    return found


class KilledError(Exception):
    pass


# --- HuggingFace


def texts(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(30, (16, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "attention_mask": torch.ones(12).long(), "labels": row[0] % 2} for row in ids]


def held() -> list[dict[str, torch.Tensor]]:
    return [{key: torch.stack([row[key] for row in texts(1)[:8]]) for key in ("input_ids", "attention_mask")}]


def trainer(folder: Path, **options: Any) -> Any:
    transformers.set_seed(0)
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.2)
    settings: dict[str, Any] = {
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 2,
        "report_to": "none",
        "use_cpu": True,
    }
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, disable_tqdm=True, **(settings | options)
    )
    model = transformers.BertForSequenceClassification(config)
    return transformers.Trainer(model, arguments, train_dataset=texts(), eval_dataset=texts(2))


def train(runner: Any, **options: Any) -> None:
    transformers.set_seed(1)  # of dropout
    runner.train(**options)


class KillAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            raise KilledError


def test_trainer_logs_the_curves_and_trains_the_same(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    bare, watched = trainer(tmp_path / "bare"), trainer(tmp_path / "watched", report_to="tensorboard")
    train(bare)
    Monitor(held(), every=2, measures=("effective_rank",)).watch(watched)
    train(watched)
    pairs = zip(bare.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    losses, others = ([h["loss"] for h in t.state.log_history if "loss" in h] for t in (bare, watched))
    assert losses == others
    logged = [entry for entry in watched.state.log_history if "collapse/verdict" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4, 6]
    written = lines(tmp_path / "watched" / "collapse")
    assert [line["step"] for line in written] == [0, 2, 4, 6]
    assert written[1]["epoch"] == 0.5
    assert written[3]["curves"]["effective_rank"]["block 1"] == logged[3]["collapse/effective_rank/block_01"]
    [folder] = {path.parent for path in tmp_path.rglob("events.out*")}
    read = events.EventAccumulator(str(folder)).Reload()
    assert [point.step for point in read.Scalars("train/collapse/effective_rank/block_01")] == [0, 2, 4, 6]


def test_trainer_resumes_after_a_kill(tmp_path: Path) -> None:
    rules = [Rule("uniformity", **ALIKE), Rule("effective_rank", "any", falls_by=0.9)]
    whole, killed, resumed = (trainer(tmp_path / name) for name in ("whole", "parts", "parts"))
    for each in (whole, killed, resumed):
        Monitor(held(), every=1, rules=rules).watch(each)
    train(whole)
    killed.add_callback(KillAt(5))
    with pytest.raises(KilledError):
        train(killed)
    assert [line["step"] for line in lines(tmp_path / "parts" / "collapse")] == [0, 1, 2, 3, 4, 5]
    with pytest.warns(UserWarning, match=r"step 5.*dropped"):
        train(resumed, resume_from_checkpoint=True)
    assert lines(tmp_path / "whole" / "collapse") == lines(tmp_path / "parts" / "collapse")
    references = [json.loads((tmp_path / name / "collapse" / "first.json").read_text()) for name in ("whole", "parts")]
    assert references[0]["layers"] == references[1]["layers"]
    again = trainer(tmp_path / "parts")
    Monitor(held(), every=1).watch(again)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        train(again)


def test_trainer_stops_and_saves(tmp_path: Path) -> None:
    watched = trainer(tmp_path, save_strategy="no")
    rules = [
        Rule("uniformity", **MET, then="save"),  # at step 0, where the trainer cannot save
        Rule("uniformity", **MET, patience=2, then="save"),
        Rule("uniformity", **MET, patience=3, then="stop"),
    ]
    monitor = Monitor(held(), every=2, rules=rules, folder=tmp_path / "own")
    monitor.watch(watched)
    with pytest.warns(CollapseWarning) as told:
        train(watched)
    assert sum(isinstance(w.message, CollapseWarning) for w in told) == 3
    assert watched.state.global_step == 4
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    assert (tmp_path / "own" / "collapse.json").exists()


def test_trainer_measures_at_evaluations(tmp_path: Path) -> None:
    watched = trainer(tmp_path, eval_strategy="steps", eval_steps=3, bf16=True)
    Monitor(held(), every=None).watch(watched)
    watched.evaluate()
    train(watched)
    watched.evaluate()
    assert [line["step"] for line in lines(tmp_path / "collapse")] == [0, 3, 6]


# --- Lightning


class Lit(lightning.LightningModule):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True), 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: torch.Tensor, number: int) -> Any:
        return F.mse_loss(self(batch), batch.roll(1, 1))

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("loss", F.mse_loss(self(batch), batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(0)), 2)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def fit(folder: Path, *callbacks: Any, model: Any = None, start: Path | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_steps": 8, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    runner = lightning.Trainer(default_root_dir=folder, callbacks=list(callbacks), **(settings | quiet | options))
    model = model or Lit()
    torch.manual_seed(1)
    runner.fit(model, ckpt_path=start)
    return runner


def lit_monitor(folder: Path | None, every: int | None = 2, **options: Any) -> Monitor:
    return Monitor(
        [torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(1))], every=every, folder=folder, **options
    )


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*treespec.*", "ignore:.*GPU.*"),
    pytest.mark.filterwarnings("ignore:You're resuming:UserWarning", "ignore:Checkpoint directory"),
]


def test_lightning_logs_and_trains_the_same(tmp_path: Path) -> None:
    logger = pytest.importorskip("lightning.pytorch.loggers").CSVLogger(tmp_path)
    bare, watched = Lit(), Lit()
    fit(tmp_path, model=bare)
    monitor = lit_monitor(tmp_path / "own")
    fit(tmp_path, monitor.lightning(), model=watched, logger=logger)
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), watched.parameters(), strict=True))
    assert [line["step"] for line in lines(tmp_path / "own")] == [0, 2, 4, 6, 8]
    table = (Path(logger.log_dir) / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert "collapse/effective_rank/block_01" in table[0].split(",")
    assert monitor.cost.measurements == 5


@pytest.mark.parametrize("own", ["own", None])
def test_lightning_resumes_from_its_checkpoint(tmp_path: Path, own: str | None) -> None:
    class Kill(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "last.ckpt")  # of step 4

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                raise KilledError

    def new(name: str) -> Monitor:
        return lit_monitor(tmp_path / name if own else None, rules=[Rule("uniformity", **MET, patience=4)])

    first, second, whole = new("parts"), new("parts"), new("whole")
    plain = [{"model": Lit(dropout=0)} for _ in range(3)]  # Lightning does not keep the random state of dropout
    with pytest.warns(CollapseWarning, match="Step 6"):
        fit(tmp_path, whole.lightning(), **plain[0])
    with pytest.raises(KilledError), pytest.warns(CollapseWarning, match="Step 6"):
        fit(tmp_path, first.lightning(), Kill(), **plain[1])
    with pytest.warns(CollapseWarning, match="Step 6"):
        fit(tmp_path, second.lightning(), start=tmp_path / "last.ckpt", **plain[2])
    states = [monitor.state_dict() for monitor in (whole, second)]
    for state in states:
        del state["seconds"], state["elapsed"]
    assert states[0] == states[1]
    if own:
        assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_lightning_test_of_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    monitor = lit_monitor(tmp_path / "own")
    runner = fit(tmp_path, monitor.lightning(), Save(), max_steps=6)
    before = monitor.state_dict() | {"elapsed": 0}
    runner.validate(Lit(), ckpt_path=tmp_path / "early.ckpt", verbose=False)
    assert monitor.state_dict() | {"elapsed": 0} == before
    runner.fit_loop.epoch_loop.max_steps = 8
    runner.fit(Lit())
    assert [line["step"] for line in lines(tmp_path / "own")] == [0, 2, 4, 6, 8]


def test_lightning_stops_and_saves(tmp_path: Path) -> None:
    rules = [Rule("uniformity", **MET, patience=2, then="save"), Rule("uniformity", **MET, patience=3, then="stop")]
    with pytest.warns(CollapseWarning):
        runner = fit(tmp_path, lit_monitor(None, rules=rules).lightning())
    assert runner.global_step == 4
    assert torch.load(tmp_path / "collapse-step=2.ckpt")["callbacks"]["uncollapse.Monitor"]["measured"] == 2


def test_lightning_measures_at_validations(tmp_path: Path) -> None:
    callback = lit_monitor(tmp_path, every=None).lightning()
    runner = fit(tmp_path, callback, val_check_interval=4)
    runner.validate(Lit(), verbose=False)
    assert [line["step"] for line in lines(tmp_path)] == [0, 4, 8]


# --- PyG


def test_a_loop_over_one_graph(tmp_path: Path) -> None:
    data = pytest.importorskip("torch_geometric.data")
    models = pytest.importorskip("torch_geometric.nn.models")
    torch.manual_seed(0)
    graph = data.Data(x=torch.randn(20, 5), edge_index=torch.randint(20, (2, 80)), y=torch.randint(3, (20,)))
    model: Any = models.GCN(5, 16, 4, 3, dropout=0.5)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    measures = ("effective_rank", "dirichlet_energy")
    rules = [Rule("dirichlet_energy", 2, falls_by=0.99)]
    monitor = Monitor([graph], every=5, measures=measures, rules=rules, folder=tmp_path)
    for epoch in range(11):
        model.train()
        optimiser.zero_grad()
        F.cross_entropy(model(graph.x, graph.edge_index), graph.y).backward()
        optimiser.step()
        monitor.step(model, epoch, epoch=epoch)
        assert model.training
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [0, 5, 10]
    assert {"block 0", "block 1", "block 2"} <= set(written[0]["curves"]["dirichlet_energy"])
    with pytest.raises(ValueError, match="one Data"):
        Monitor(graph)
