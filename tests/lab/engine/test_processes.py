"""Several processes that share a training do what one does, stop together, and go on together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import finish, start
from tests.lab.engine import shared_runs
from torch import Tensor, distributed

pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")

Found = list[dict[str, Any]]  # of each process, by case


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the processes found, in one go."""
    folder = tmp_path_factory.mktemp("processes")
    started, _store = start(request.param, shared_runs.__file__, str(folder))
    for code, _, problems in finish(started):
        assert code == 0, problems
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("case", ["mean", "pairs", "momentum", "cure"])
def test_weights_are_those_of_one_process(found: Found, case: str) -> None:
    alone = shared_runs.plain(getattr(shared_runs, case)())
    for each in found:
        assert difference(each[case]["weights"], found[0][case]["weights"]) == 0
    assert difference(alone["weights"], found[0][case]["weights"]) < 1e-6
    losses, shared = ([epoch["loss"] for epoch in run["history"]["epochs"]] for run in (alone, found[0][case]))
    assert shared == pytest.approx(losses, abs=1e-6)


def test_the_figures_of_the_first_process_count(found: Found) -> None:
    histories = [each["mean"]["history"] for each in found]
    assert all(history == histories[0] for history in histories)
    assert all(epoch["size"] < 1 for epoch in histories[0]["epochs"])  # the others' are a hundred larger


def test_a_cure_in_a_model_that_is_spread_over_processes(found: Found) -> None:
    alone = shared_runs.sharded()["state"]
    assert all(difference(alone, each["sharded"]["state"]) < 1e-6 for each in found)


def test_a_cure_for_a_model_that_is_spread_already(found: Found) -> None:
    for each in found:
        assert "before the model is wrapped" in each["cured_later"]["told"]
        assert each["cured_later"]["difference"] < 1e-6


def test_all_end_with_the_statistics_of_the_first_process(found: Found) -> None:
    assert all(difference(each["normed"]["weights"], found[0]["normed"]["weights"]) == 0 for each in found)


def test_a_signal_to_one_process_stops_all_and_they_go_on_as_if_nothing_had_been(found: Found) -> None:
    for each in found:
        run = each["resumed"]
        assert run["told"] == "in epoch 2 of 3"
        assert run["written"] == ["step-000000006"]
        assert run["steps"] == 12
        rounding = 0 if len(found) == 2 else 1e-6  # sums of more than two depend on how gradients are packed
        assert difference(run["weights"], run["whole"]) <= rounding


def test_a_loss_that_is_not_finite_in_one_process_stops_all_before_weights_change(found: Found) -> None:
    for each in found:
        assert each["not_finite"]["told"].startswith("The loss became nan in epoch 1, step 1.")
        assert difference(each["not_finite"]["before"], each["not_finite"]["weights"]) == 0


def test_what_cannot_be_shared_is_refused_in_all(found: Found) -> None:
    words = {
        "graph": f"UsageError: {len(found)} processes cannot share a batch of this task; start one process.",
        "type": "UsageError: Processes can share tensors with rows",
        "few": f"UsageError: A batch of 1 rows is too small for {len(found)} processes",
        "other data": "UsageError: The processes do not train the same",
    }
    for each in found:
        assert {name: told[: len(words[name])] for name, told in each["refused"].items()} == words


def test_an_error_in_one_process_stops_all(found: Found) -> None:
    *others, last = (each["failing"]["told"] for each in found)
    assert last == "ValueError: a picture is upside down"
    assert all(told.startswith("PeerError: Another process of this run has stopped") for told in others)


def test_one_process_is_a_run_as_ever(tmp_path: Path) -> None:
    run = shared_runs.resumed(tmp_path)
    assert difference(dict(run["weights"].state_dict()), run["whole"]) == 0
