"""Cures in models that several processes train, or several threads run."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import uncollapse as uc

from .tiny_models import build

# Two processes see half of the batch each, the parent all of it; what was learned is saved.
TRAIN = """
import sys
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
import uncollapse as uc

def train(rank, folder):
    if rank < 2:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()  # without dropout
    x, goal = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4, 5])[:, None]
    uc.attach(model, "contra_norm", scale=0.7, learnable=True)
    own = model if rank == 2 else DistributedDataParallel(model)
    rows = slice(None) if rank == 2 else slice(2 * rank, 2 * rank + 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (own(x[rows], src_key_padding_mask=padding[rows]) - goal[rows]).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    if rank < 2:
        distributed.destroy_process_group()

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.multiprocessing.start_processes(train, (sys.argv[1],), nprocs=2, start_method="fork")
    train(2, sys.argv[1])
"""


def test_two_processes_learn_what_one_learns(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, whole = (torch.load(tmp_path / f"{rank}.pt") for rank in range(3))
    scales = [name for name in whole if name.endswith("scale_param")]
    assert len(scales) == 2
    assert all((whole[name] - 0.7).abs().max() > 1e-3 for name in scales)
    for name, value in whole.items():
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], value, atol=1e-6, rtol=0), name


@pytest.fixture
def alone():
    """A process group of this process only."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_parameters_must_come_before_the_wrapper(alone):
    """A cure without parameters may come later."""
    tiny = build("encoder")
    plain = tiny.output()
    with uc.attach(tiny.model, "contra_norm", scale=0.5):
        expected = tiny.output()
    assert (expected - plain).abs().max() > 0.1
    wrapped = DistributedDataParallel(tiny.model)
    keys = list(wrapped.state_dict())
    with pytest.raises(ValueError, match="before"):
        uc.attach(wrapped, "contra_norm", scale=0.5, learnable=True)
    assert list(wrapped.state_dict()) == keys
    with uc.attach(wrapped, "contra_norm", scale=0.5):
        output = wrapped(**tiny.batch)
        assert torch.equal(output, expected)
        output.sum().backward()
    assert torch.equal(wrapped(**tiny.batch), plain)


def test_data_parallel_is_refused():
    tiny = build("mlp")
    uc.attach(tiny.model, "contra_norm", scale=0.5, **tiny.where)
    replica = tiny.model._replicate_for_data_parallel()  # what nn.DataParallel makes of each module on two devices
    assert isinstance(replica, nn.Module)
    layer = tiny.model.layers[0]._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="DataParallel"):
        layer(torch.randn(2, 16))


def test_accelerate_trains_the_cure():
    accelerate = pytest.importorskip("accelerate")
    tiny = build("encoder")
    handle = uc.attach(tiny.model, "contra_norm", scale=0.5, learnable=True, **tiny.where)
    expected = tiny.output()
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.5)
        model, optimizer = accelerator.prepare(tiny.model, optimizer)
        output = model(**tiny.batch)
        assert torch.equal(output, expected)
        accelerator.backward((output - torch.randn_like(output)).square().mean())
        optimizer.step()
        inner = accelerator.unwrap_model(model)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert inner is tiny.model
    assert all((cure.scale_param - 0.5).abs().max() > 1e-4 for cure in handle.cures.values())


def test_a_second_thread_is_refused_while_the_first_is_within_a_block():
    tiny = build("encoder")
    uc.attach(tiny.model, "contra_norm", scale=0.5, at=("attention.residual", "mlp.residual"))
    layer, x = tiny.model.layers[1], tiny.batch["src"]
    expected, found = tiny.output().detach(), []
    within, go_on = threading.Event(), threading.Event()

    def wait(module, args):
        if threading.current_thread() is first:
            within.set()
            go_on.wait(60)

    first = threading.Thread(target=lambda: found.append(tiny.output().detach()))
    layer.linear1.register_forward_pre_hook(wait)
    first.start()
    assert within.wait(60)
    try:
        for call in (tiny.output, lambda: layer(x), lambda: layer.norm1(x)):  # the model, the block, a part of it
            with pytest.raises(RuntimeError, match="threads"):
                call()
    finally:
        go_on.set()
        first.join()
    assert torch.equal(found[0], expected)
    assert torch.equal(tiny.output(), expected)
