"""Work of several layers runs in several threads and gives what it gives in one."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.pairwise.threads import run_side_by_side


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_results_come_in_order_from_other_threads_with_one_thread_each() -> None:
    meeting = threading.Barrier(2, timeout=30)  # passed only by two at a time

    def work(number: int) -> tuple[int, int, bool]:
        meeting.wait()
        return number, torch.get_num_threads(), torch.is_grad_enabled()

    assert run_side_by_side(partial(work, n) for n in range(4)) == [(n, 1, False) for n in range(4)]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_inference_mode_applies_to_the_threads() -> None:
    with torch.inference_mode():
        total = torch.zeros(2)
        run_side_by_side([partial(total[0].fill_, 1), partial(total[1].fill_, 2)])
    assert total.tolist() == [1, 2]


@pytest.mark.usefixtures("two_threads")
def test_the_first_error_is_raised() -> None:
    def fail(word: str) -> None:
        raise ValueError(word)

    with pytest.raises(ValueError, match="first"):
        run_side_by_side([partial(fail, "first"), partial(fail, "second")])
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_diagnosis_is_the_same_with_one_thread() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 3)
    batches = [torch.randn(10, 12, 32) for _ in range(3)]
    several = uc.diagnose(model, batches)
    torch.set_num_threads(1)
    alone = uc.diagnose(model, batches)
    for one, other in zip(several.layers + several.baseline, alone.layers + alone.baseline, strict=True):
        assert one.measures.keys() == other.measures.keys()
        for name in one.measures:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name


@pytest.mark.usefixtures("two_threads")
def test_an_error_names_the_first_layer_that_has_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    model[1].weight.data *= 1e30  # also the input of the third layer is that large
    with pytest.raises(uc.errors.NotFiniteError, match="precision"):
        uc.diagnose(model, [torch.randn(4, 6, 8)], modules="*")
