"""Diagnoses in several threads: the same numbers as one after the other, and a process that is left as it was."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.backbones import forward

PLAN = uc.Plan(baseline=0)
WAIT = 0.5  # seconds in which the other thread would get as far as it can


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(block, 3, enable_nested_tensor=False).train()


def batch() -> Tensor:
    return torch.randn(8, 10, 32, generator=torch.Generator().manual_seed(1))


def interleave(first: nn.Module, second: nn.Module) -> list[uc.Diagnosis]:
    """Diagnose in two threads: the second begins while the first one runs, and ends after it."""
    begun, joined, ended = threading.Event(), threading.Event(), threading.Event()
    found: dict[int, uc.Diagnosis] = {}

    def run_first(model: nn.Module, x: Tensor) -> Any:
        begun.set()
        joined.wait(WAIT)
        return model(x)

    def run_second(model: nn.Module, x: Tensor) -> Any:
        joined.set()
        output = model(x)
        ended.wait(WAIT)
        return output

    def diagnose(number: int, model: nn.Module, call: Callable[[nn.Module, Any], Any]) -> None:
        found[number] = uc.diagnose(model, [batch()], call=call, plan=PLAN)
        ended.set()

    one = threading.Thread(target=diagnose, args=(0, first, run_first))
    two = threading.Thread(target=diagnose, args=(1, second, run_second))
    one.start()
    assert begun.wait(30)
    two.start()
    one.join()
    two.join()
    return [found[0], found[1]]


@pytest.mark.parametrize("same", [False, True])
def test_two_threads_measure_what_one_does_and_leave_the_process_as_it_was(same: bool) -> None:
    from torch._dynamo import eval_frame

    model = encoder()
    want = uc.diagnose(model, [batch()], plan=PLAN)
    for d in interleave(model, model if same else encoder()):
        assert d.tokens == want.tokens
        assert [layer.measures for layer in d.layers] == [layer.measures for layer in want.layers]
    assert torch.backends.mha.get_fastpath_enabled()
    assert eval_frame._stance.stance == "default"
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_pass_in_another_thread_is_not_measured() -> None:
    def call(model: nn.Module, x: Tensor) -> Any:
        other = threading.Thread(target=lambda: model(x * 2))
        other.start()
        other.join()
        return model(x)

    model = encoder()
    want, got = (uc.diagnose(model, [batch()], call=how, plan=PLAN) for how in (forward.run, call))
    assert [layer.measures for layer in got.layers] == [layer.measures for layer in want.layers]


def test_inner_tokens_of_training_are_read_while_another_thread_inspects() -> None:
    model = encoder()
    inside, done = threading.Event(), threading.Event()

    def inspect() -> None:
        with forward.inspection_mode(encoder()):
            inside.set()
            done.wait(30)

    other = threading.Thread(target=inspect)
    other.start()
    assert inside.wait(30)
    try:
        with uc.tokens(model, layers="last") as tokens:
            model(batch())
            assert tokens["last"].shape == (8, 10, 32)
    finally:
        done.set()
        other.join()


def test_the_fast_path_stays_off_until_the_last_reader_is_done() -> None:
    from uncollapse.backbones.torch import step_by_step

    first, second = step_by_step(encoder()), step_by_step(encoder())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()
