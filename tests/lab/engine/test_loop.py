"""The training loop against a loop written out by hand; its choices, its stops, its errors."""

import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.lab.engine.polynomial import SETTINGS, task, trained
from torch import Tensor, nn

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.task import Task, TrainingOptions

pytest.importorskip("accelerate")
CPU = Runtime(device="cpu")


def line(batches: list[Tensor], lr: float = 0.1, **more: Any) -> Task:
    """A single weight w, with the loss mean((w·x − 1)²)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    loss = lambda model, x: (model(x) - 1).square().mean()  # noqa: E731
    return Task(model, torch.optim.SGD(model.parameters(), lr=lr), lambda epoch: batches, loss, **more)


def weight(task: Task) -> float:
    return next(task.model.parameters()).item()


def by_hand(batches: list[list[float]], lr: float, accumulate: int, clip: float, epochs: int) -> float:
    w = 0.0
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            group = batches[start : start + accumulate]
            gradient = sum(sum(2 * (w * x - 1) * x for x in batch) / len(batch) for batch in group) / len(group)
            w -= lr * math.copysign(min(abs(gradient), clip), gradient)
    return w


@pytest.mark.parametrize("accumulate", [1, 2, 3, 9])
def test_steps_are_on_the_mean_loss_of_a_group(accumulate: int) -> None:
    numbers = [[1.0, 2.0], [0.5], [3.0, 1.0, 0.2], [1.5], [0.1]]  # the last group of an epoch may be smaller
    made = line([torch.tensor(batch).unsqueeze(1) for batch in numbers])
    fit(made, TrainingOptions(epochs=3, accumulate=accumulate, clip=0.8), CPU)
    assert weight(made) == pytest.approx(by_hand(numbers, 0.1, accumulate, 0.8, 3), rel=1e-5)


def test_the_schedule_multiplies_the_learning_rate() -> None:
    made = line([torch.ones(1, 1)], lr=0.5, schedule=lambda step: [1.0, 0.5, 0.0][step])
    fit(made, TrainingOptions(epochs=3), CPU)
    assert weight(made) == pytest.approx(1.0)  # one full step of 0.5·2·(1 − 0) lands on the solution, then none is left
    assert made.optimizer.param_groups[0]["lr"] == 0.0


def test_averages_of_the_weights_are_evaluated_and_kept() -> None:
    seen: list[float] = []
    made = line([torch.ones(1, 1)], lr=0.25, evaluate=lambda model: seen.append(next(model.parameters()).item()) or {})
    fit(made, TrainingOptions(epochs=3, ema=0.5), CPU)
    path = [0.5, 0.75, 0.875]
    average = [path[0], 0.5 * path[0] + 0.5 * path[1]]
    average.append(0.5 * average[-1] + 0.5 * path[2])
    assert seen == pytest.approx(average)
    assert weight(made) == pytest.approx(average[-1])


def scripted(figures: list[float], **settings: Any) -> tuple[Any, Task]:
    """Training whose evaluations say what the script says; the weight after epoch n is n."""
    script = iter(figures)
    made = line([torch.ones(1, 1)], evaluate=lambda model: {"score": next(script)})
    made = replace(made, loss=lambda model, x: -10 * model(x).sum())  # a step of lr·10 = 1
    return fit(made, TrainingOptions(epochs=len(figures), select="score", **settings), CPU), made


def test_the_best_epoch_is_kept_and_the_first_of_equals() -> None:
    history, made = scripted([0.1, 0.5, 0.3, 0.5, 0.2])
    assert (history.selected, history.ended, len(history.epochs)) == (2, "the last epoch", 5)
    assert weight(made) == pytest.approx(2.0)
    history, made = scripted([0.4, 0.5, 0.3], better="lower")
    assert (history.selected, weight(made)) == (3, pytest.approx(3.0))


def test_a_figure_that_is_no_number_is_the_worst() -> None:
    history, made = scripted([math.nan, 0.1, math.nan, 0.05])
    assert (history.selected, weight(made)) == (2, pytest.approx(2.0))


def test_figures_that_are_never_numbers_do_not_switch_patience_off() -> None:
    history, _ = scripted([math.nan] * 6, patience=2)
    assert (history.selected, len(history.epochs)) == (1, 3)


def test_figures_may_be_tensors_or_numpy_s(tmp_path: Path) -> None:
    made = line([torch.ones(1, 1)], evaluate=lambda model: {"a": torch.tensor(0.5), "b": numpy.float32(0.25)})
    history = fit(made, TrainingOptions(epochs=2), Runtime(device="cpu", checkpoints=tmp_path, save_seconds=0.0))
    assert [(figures["a"], figures["b"]) for figures in history.epochs] == [(0.5, 0.25)] * 2


def test_evaluations_draw_from_their_own_random_numbers() -> None:
    often, _ = trained(evaluate_every=1, select=None)
    seldom, _ = trained(evaluate_every=6, select=None)
    assert [figures["loss"] for figures in often.epochs] == [figures["loss"] for figures in seldom.epochs]


def test_patience_stops_the_training() -> None:
    history, _ = scripted([0.1, 0.5, 0.3, 0.5, 0.9], patience=2)
    assert (history.selected, history.ended) == (2, "no better score in 2 evaluations")
    assert [figures["epoch"] for figures in history.epochs] == [1, 2, 3, 4]


def test_evaluations_are_as_rare_as_asked_for_but_for_the_last_epoch() -> None:
    made = line([torch.ones(1, 1)], evaluate=lambda model: {"score": 1.0})
    history = fit(made, TrainingOptions(epochs=7, evaluate_every=3), CPU)
    assert [figures["epoch"] for figures in history.epochs if "score" in figures] == [3, 6, 7]
    assert all(set(figures) >= {"epoch", "loss"} for figures in history.epochs)


def test_the_seed_decides_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    one, _ = trained()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two, _ = trained()
    torch.manual_seed(0)  # as `task` leaves it
    task()
    other, _ = trained(seed=4)
    assert one.epochs == two.epochs != other.epochs
    assert not torch.equal(before, torch.get_rng_state())  # `task` seeds; `fit` alone leaves the state as it was


def test_fit_leaves_the_random_state_as_it_was() -> None:
    made = task()
    before = torch.get_rng_state()
    fit(made, TrainingOptions(**SETTINGS), CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_mixed_precision_and_then_full_precision_in_one_process() -> None:
    kinds: list[torch.dtype] = []
    for precision, kind in (("bf16", torch.bfloat16), ("no", torch.float32)):
        inner = nn.Linear(1, 1)
        inner.register_forward_hook(lambda module, args, out: kinds.append(out.dtype))
        model = nn.Sequential(inner)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        made = Task(model, optimiser, lambda epoch: [torch.ones(2, 1)], lambda model, x: model(x).square().mean())
        fit(made, TrainingOptions(epochs=1, precision=precision), CPU)  # type: ignore[arg-type]
        assert kinds[-1] == kind
        assert "forward" not in vars(model)  # Accelerate's wrapper is gone
        assert inner.weight.dtype == torch.float32


def test_progress_counts_steps_or_epochs_where_steps_are_not_known() -> None:
    seen: list[tuple[int, int]] = []
    runtime = Runtime(device="cpu", progress=lambda done, total, figures: seen.append((done, total)))
    made = line([torch.ones(1, 1)] * 3)
    fit(made, TrainingOptions(epochs=2, accumulate=2), runtime)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    seen.clear()

    def stream() -> Iterator[Tensor]:
        yield from [torch.ones(1, 1)] * 3

    fit(replace(made, batches=lambda epoch: stream()), TrainingOptions(epochs=2), runtime)
    assert seen == [(1, 2)] * 3 + [(2, 2)] * 3


def test_speed_is_told_where_batches_are_counted() -> None:
    told: list[set[str]] = []
    runtime = Runtime(device="cpu", progress=lambda done, total, figures: told.append(set(figures)))
    history = fit(line([torch.ones(2, 1)] * 2, unit="points"), TrainingOptions(epochs=2), runtime)
    assert told == [{"epoch", "loss"}] + [{"epoch", "loss", "points/s"}] * 3
    assert set(history.pace) == {"points_per_second", "waiting"}
    assert history.pace["points_per_second"] > 0
    assert 0 <= history.pace["waiting"] <= 1
    assert fit(line([torch.ones(2, 1)]), TrainingOptions(epochs=2), runtime).pace == {}


def test_what_makes_batches_is_closed_when_it_ends_early() -> None:
    closed: list[int] = []

    def stream(epoch: int) -> Iterator[Tensor]:
        try:
            for _ in range(3):
                yield torch.ones(1, 1)
        finally:
            closed.append(epoch)

    def press(done: int, total: int, figures: Any) -> None:
        if done == 1 and figures["epoch"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(replace(line([]), batches=stream), TrainingOptions(epochs=2), Runtime(device="cpu", progress=press))
    assert caught.traceback  # which holds on to all that ran: it is not left to the garbage collector
    assert closed == [1]


def test_a_loss_that_is_not_finite_is_an_error_that_says_where() -> None:
    made = replace(line([torch.ones(1, 1)] * 3), loss=lambda model, x: model(x).sum() * math.nan)
    with pytest.raises(NotFiniteError, match=r"nan.*step 1"):
        fit(made, TrainingOptions(epochs=2), CPU)
    assert weight(made) == 0.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 1, "accumulate": 0}, "accumulate must be at least 1"),
        ({"epochs": 1, "patience": 3}, "patience needs `select`"),
        ({"epochs": 1, "ema": 1.0}, "ema is a decay between 0 and 1"),
        ({"epochs": 1, "clip": -1.0}, "clip"),
        ({"epochs": 1, "select": "v", "better": "hgher"}, "better must be 'higher' or 'lower', got 'hgher'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TrainingOptions(**settings)


def test_what_is_not_there() -> None:
    made = line([torch.ones(1, 1)], evaluate=lambda model: {"score": 1.0})
    with pytest.raises(UsageError, match=r"'f1'.*score"):
        fit(made, TrainingOptions(epochs=1, select="f1"), CPU)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="'cuda'"):
            fit(made, TrainingOptions(epochs=1), Runtime(device="cuda"))


def test_what_cannot_be_selected_or_placed() -> None:
    with pytest.raises(UsageError, match="evaluates"):
        fit(line([torch.ones(1, 1)]), TrainingOptions(epochs=1, select="score"), CPU)
    with pytest.raises(UsageError, match="number"):
        fit(line([torch.ones(1, 1)]), TrainingOptions(epochs=1), Runtime(device="cuda:1"))


def test_an_interrupt_in_the_last_evaluation_is_heard(tmp_path: Path) -> None:
    """The run is complete then, and yet it stops: the one that goes on has nothing left to do but to end."""
    presses = iter([False, True])

    def evaluate(model: nn.Module) -> dict[str, float]:
        if next(presses, False):
            os.kill(os.getpid(), signal.SIGINT)
        return {"score": 1.0}

    made = line([torch.ones(1, 1)], evaluate=evaluate)
    runtime = Runtime(device="cpu", checkpoints=tmp_path)
    with pytest.raises(KeyboardInterrupt, match="epoch 2"):
        fit(made, TrainingOptions(epochs=2), runtime, "x")
    again = line([torch.ones(1, 1)], evaluate=evaluate)
    history = fit(again, TrainingOptions(epochs=2), runtime, "x")
    assert [figures["epoch"] for figures in history.epochs] == [1, 2]
    assert weight(again) == weight(made)


def test_figures_are_tracked(tmp_path: Path) -> None:
    made = line([torch.ones(1, 1)] * 2, evaluate=lambda model: {"score": 0.5})
    fit(made, TrainingOptions(epochs=2), Runtime(device="cpu", trackers=("jsonl",), tracker_folder=tmp_path))
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["score"]) for entry in lines] == [(2, 0.5), (4, 0.5)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_step_and_writes_a_checkpoint(tmp_path: Path, number: int) -> None:
    whole, weights = trained()

    def press(done: int, total: int, figures: Any) -> None:
        if done == 7:
            os.kill(os.getpid(), number)

    told: list[str] = []
    runtime = Runtime(checkpoints=tmp_path, save_seconds=1e9, progress=press, on_stage=told.append)
    with pytest.raises(KeyboardInterrupt, match="epoch 3"):
        fit(task(), TrainingOptions(**SETTINGS), runtime, "polynomial")
    assert told == ["stopping after this step; Ctrl-C again stops at once"]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000007"]
    again, found = trained(tmp_path)
    assert again.epochs == whole.epochs
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_the_main_thread_it_trains_as_well() -> None:
    made, errors = line([torch.ones(1, 1)]), []

    def work() -> None:
        try:
            fit(made, TrainingOptions(epochs=1), CPU)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert weight(made) == pytest.approx(0.2)
