"""NaN and infinite numbers in a model are told with the module at which they begin."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.backbones.nonfinite import first_fault
from uncollapse.errors import NotFiniteError
from uncollapse.monitoring.monitor import CollapseWarning, Monitor, Rule

OVERFLOW = "a float16 overflow (largest finite number 65,504); run it in bfloat16 or float32"


class Block(nn.Module):
    """A block with a residual sum, which is no module."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.norm, self.linear, self.gain = nn.LayerNorm(8), nn.Linear(8, 8), gain

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.linear(self.norm(x))


class Net(nn.Module):
    """Three blocks whose residual stream grows by `gain`."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(gain) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, 8, generator=generator) for _ in range(count)]


def poisoned(net: Net) -> Net:
    with torch.no_grad():
        net.blocks[1].linear.bias[3] = torch.nan
    return net


def overflowing() -> Net:
    """In half precision, whose second linear gives more than float16 can hold."""
    net = Net().half()
    with torch.no_grad():
        net.blocks[1].linear.weight.copy_(30_000.0 * torch.eye(8))
        net.blocks[1].linear.bias.fill_(60_000.0)
    return net


def diagnosed(net: nn.Module, data: list[Tensor]) -> str:
    with pytest.raises(NotFiniteError) as caught:
        uc.diagnose(net, data, modules="blocks.*", plan=uc.Plan(baseline=0))
    return str(caught.value)


def test_weights_that_are_nan_are_named() -> None:
    told = diagnosed(poisoned(Net()), batches())
    assert told.startswith("At blocks.1 (output of blocks.1): 24 NaN among 192 numbers in batch 1. ")
    assert told.endswith("It begins at blocks.1.linear (Linear): its bias holds 1 NaN among 8 numbers.")


def test_a_batch_with_nan_is_named_by_its_number() -> None:
    data = batches(3)
    data[2][0, 0, 0] = torch.inf
    told = diagnosed(Net(), data)
    assert "in batch 3." in told
    assert told.endswith("The batch itself holds 1 infinite among 192 numbers.")


def test_an_overflow_in_half_precision_is_named_where_it_begins() -> None:
    told = diagnosed(overflowing(), [x.half() for x in batches()])
    assert told.startswith("At blocks.1 (output of blocks.1): ")
    found = re.search(r"It begins at blocks\.1\.linear \(Linear\): from finite inputs it computes (\d+) infinite", told)
    assert found, told
    assert told.endswith(f": {OVERFLOW}.")


def test_an_overflow_between_modules_is_named_at_the_next_one() -> None:
    net = Net(gain=60_000.0).half()
    told = diagnosed(net, [x.half() for x in batches()])
    assert "It begins at blocks.0 (Block): from finite inputs it computes" in told
    assert OVERFLOW in told


def test_the_same_numbers_in_full_precision_are_finite() -> None:
    uc.diagnose(overflowing().float(), batches(), modules="blocks.*", plan=uc.Plan(baseline=0))


def test_places_of_a_block_are_named() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    with torch.no_grad():
        model.layers[2].self_attn.out_proj.weight[0, 0] = torch.nan
    with pytest.raises(NotFiniteError, match="24 NaN") as told:
        uc.diagnose(model, batches(), at=["attention.residual"], plan=uc.Plan(baseline=0))
    assert "layers.2" in str(told.value).partition("It begins at")[2]


def test_padding_does_not_count() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    x, padding = batches(1)[0], torch.zeros(4, 6, dtype=torch.bool)
    x[0, 5], padding[0, 5] = torch.nan, True
    x[1, 0, 0] = torch.nan
    with pytest.raises(NotFiniteError, match=r"embed.*batch 1"):
        uc.diagnose(model, [{"src": x, "src_key_padding_mask": padding}], plan=uc.Plan(baseline=0))


def test_a_random_model_that_overflows_is_left_out() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    calls = 0

    def call(given: nn.Module, batch: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return given(batch if given is model else batch * torch.nan)

    found = uc.diagnose(model, batches(), call=call)
    assert found.baseline == ()
    assert any("with random weights it is not finite" in caution for caution in found.verdict.cautions)
    assert calls == 4  # once for each batch, once for the random model, once to look for the cause


def test_a_monitor_tells_the_layer() -> None:
    net = Net()
    monitor = Monitor(batches(1), every=1, rules=[Rule("finite", then="stop")], modules="blocks.*")
    monitor.step(net, 0)
    poisoned(net)
    with pytest.warns(CollapseWarning, match=r"blocks\.1\.linear.*bias"):
        monitor.step(net, 1)
    assert monitor.should_stop


class Masked(nn.Module):
    """Scores with infinite numbers below zero where nothing is to be seen, as attention has them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.ones_like(x).tril().logical_not(), -torch.inf)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: nn.Sequential(Masked(), nn.Softmax(-1), nn.Linear(8, 8)), None),
        (lambda: nn.Sequential(Masked(), nn.Softmax(-1), nn.Linear(8, 8), Log()), "3"),
        (lambda: nn.Sequential(nn.Linear(8, 8), Masked(), nn.LayerNorm(8)), "1"),
    ],
)
def test_masks_are_no_faults(make: Callable[[], nn.Module], path: str | None) -> None:
    torch.manual_seed(0)
    model = make()
    fault = first_fault(model, lambda: model(torch.randn(8, 8)))
    assert (None if fault is None else fault.path) == path


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()  # of numbers below zero


def test_what_the_pass_raises_is_not_raised_and_no_hook_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Log())

    def run() -> None:
        model(torch.randn(4, 8))
        raise RuntimeError("out of memory")

    fault = first_fault(model, run)
    assert fault is not None
    assert (fault.path, fault.cause, fault.infinite) == ("1", "output", 0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def trained(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> str:
    from uncollapse.lab.engine.loop import fit
    from uncollapse.lab.engine.runtime import Runtime
    from uncollapse.lab.engine.task import Task, TrainingOptions

    task = Task(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda epoch: batches(), loss)
    with pytest.raises(NotFiniteError) as caught:
        fit(task, TrainingOptions(epochs=1), Runtime(device="cpu"))
    return str(caught.value)


def test_training_names_the_module() -> None:
    told = trained(poisoned(Net()), lambda model, x: model(x).square().mean())
    assert told.startswith(
        "The loss became nan in epoch 1, step 1. It begins at blocks.1.linear (Linear): its bias holds"
    )
    assert told.endswith("Try a smaller learning rate, a smaller scale, or clipping of the gradient.")


def test_training_in_half_precision_names_the_overflow() -> None:
    told = trained(overflowing(), lambda model, x: model(x.half()).float().square().mean())
    assert "It begins at blocks.1.linear (Linear): from finite inputs it computes" in told
    assert OVERFLOW in told


def test_training_says_when_it_is_the_loss() -> None:
    told = trained(Net(), lambda model, x: model(x).sum() * torch.inf)
    assert "All outputs of the model's modules are finite, so it begins in the loss." in told
