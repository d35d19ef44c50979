"""The contract of `contract.py` on each backend, the switch between them, and what happens where Triton fails."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from uncollapse import pairwise
from uncollapse.errors import UsageError
from uncollapse.pairwise import backends, walk

CONTRACT = Path(__file__).with_name("contract.py")


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_contract(name: str) -> None:
    """A process of its own: Triton must know that it interprets before it is imported."""
    if name == "triton":
        pytest.importorskip("triton")
    settings = {backends.VARIABLE: name, "TRITON_INTERPRET": "1" if name == "triton" else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", str(CONTRACT)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU count as a device that the kernels were not tried on yet."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "_works", {})
    monkeypatch.setattr(backends, "_compared", set())
    monkeypatch.setattr(backends, "uses_triton", lambda x: backends._works.get(x.device, True))


def test_the_switch_sets_and_restores() -> None:
    with pairwise.backend("torch"):
        assert backends._setting == "torch"
        with pytest.raises(ZeroDivisionError), pairwise.backend("triton"):
            raise ZeroDivisionError
        assert backends._setting == "torch"
        pairwise.backend("auto")  # for good, until somebody else sets it
        assert backends._setting == "auto"
    with pytest.raises(UsageError, match="'triton'"):
        pairwise.backend("tritn")  # type: ignore[arg-type]


def test_the_environment_sets_the_first_backend() -> None:
    code = "from uncollapse.pairwise import backends; print(backends._setting)"
    for name, seen in (("torch", "torch"), ("", "auto"), ("cuda", "'cuda'")):
        env = os.environ | {backends.VARIABLE: name}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
        assert seen in (done.stdout if name != "cuda" else done.stderr.splitlines()[-1])


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.randn(4, 3)
    with pairwise.backend("triton"):
        monkeypatch.setattr(backends, "INSTALLED", True)
        with pytest.raises(UsageError, match="TRITON_INTERPRET=1"):
            pairwise.logsumexp(x, x)
        monkeypatch.setattr(backends, "INSTALLED", False)
        with pytest.raises(UsageError, match=r"uncollapse\[triton\]"):
            pairwise.logsumexp(x, x)
        assert pairwise.logsumexp(x.double(), x.double()).dtype == torch.float64  # always tiles


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("failure", ["raises", "differs"])
def test_tiles_take_over_where_the_kernels_fail(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    def difference(like: torch.Tensor, kind: str) -> float:
        if failure == "raises":
            raise RuntimeError("no such instruction")
        return 0.3

    monkeypatch.setattr(backends, "difference", difference)
    x = torch.randn(20, 4).bfloat16()
    with pytest.warns(UserWarning, match="instruction" if failure == "raises" else "doctor --gpu"):
        mean = pairwise.softmax_mean(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pairwise.softmax_mean(x, x, x)
    monkeypatch.undo()
    assert torch.equal(mean, pairwise.softmax_mean(x, x, x))
    assert torch.equal(again, mean)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_width_that_cannot_be_compiled_goes_to_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from uncollapse.pairwise import fused

    def refuse(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(backends, "difference", lambda like, kind: 0.0)
    monkeypatch.setattr(fused, "forward", refuse)
    x = torch.randn(20, 4)
    with pytest.warns(UserWarning, match="shared memory"):
        mean = pairwise.softmax_mean(x, x, x)
    assert torch.equal(mean, walk.forward(x[None], None, x[None], None, 1.0, pairwise.Pairs())[0][0])


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_each_dtype_and_kind_of_sum_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact kernels may be right where those on tensor cores are not, and means where sums of columns are not."""
    from uncollapse.pairwise import fused

    seen: list[tuple[torch.dtype, str]] = []

    def difference(like: torch.Tensor, kind: str) -> float:
        seen.append((like.dtype, kind))
        return 0.3 if kind == "both ways" else 0.0

    monkeypatch.setattr(backends, "difference", difference)
    for name in ("forward", "spread"):  # Triton would need its interpreter
        monkeypatch.setattr(fused, name, getattr(walk, name))
    x = torch.randn(20, 4)
    for _ in range(2):
        for rows in (x, x.bfloat16()):
            pairwise.softmax_mean(rows, rows, rows)
        pairwise.softmax_mean(x, x, x, normalize="columns")
    assert seen == [(torch.float32, "means"), (torch.bfloat16, "means"), (torch.float32, "columns")]
    with pytest.warns(UserWarning, match="differ"):
        pairwise.log_sums(x, x, 1.0, False)
    pairwise.softmax_mean(x, x, x)  # by tiles from now on, without another comparison
    assert len(seen) == 4


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_no_memory_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from uncollapse.pairwise import fused

    def exhaust(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(backends, "difference", lambda like, kind: 0.0)
    monkeypatch.setattr(fused, "forward", exhaust)
    x = torch.randn(4, 3)
    with pytest.raises(torch.OutOfMemoryError):  # and no warning, which is an error in tests
        pairwise.logsumexp(x, x)


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_of_torch_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    monkeypatch.setattr(backends, "ATTENTION_DEVICES", ("cpu",))
    calls = []
    attention = backends.attention
    monkeypatch.setattr(backends, "attention", lambda *a, **o: calls.append(attention(*a, **o)) or calls[-1])
    x, v = (torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    for q, k, w in ((x, x, v), (x[0], x[0], v[0]), (x[:, None], x, v[0])):  # one set, and more dimensions, as well
        got = pairwise.softmax_mean(q, k, w, temperature=3.0, causal=causal)
        assert calls.pop() is not None
        assert got.dtype == torch.bfloat16
        want = pairwise.softmax_mean(q.double(), k.double(), w.double(), temperature=3.0, causal=causal)
        assert got.shape == want.shape
        assert (got - want).norm() <= torch.finfo(torch.bfloat16).eps * want.norm()
    for options in ({"exclude": "self"}, {"mask": torch.ones(30, dtype=torch.bool)}, {"temperature": torch.ones(1)}):
        pairwise.softmax_mean(x, x, v, **options)
    pairwise.softmax_mean(x.float(), x.float(), v.float())
    with pairwise.backend("torch"):
        pairwise.softmax_mean(x, x, v)
    assert calls == []


def test_tiles_where_torch_has_no_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    x = torch.randn(30, 8).bfloat16()
    want = pairwise.softmax_mean(x, x, x)
    monkeypatch.setattr(backends, "ATTENTION_DEVICES", ("cpu",))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    assert torch.equal(pairwise.softmax_mean(x, x, x), want)


@pytest.mark.distributed
def test_rows_of_several_processes_go_through_triton() -> None:
    """InfoNCE with gather=True in two processes, in Triton's interpreter, is that of one process."""
    pytest.importorskip("triton")
    settings = {backends.VARIABLE: "triton", "TRITON_INTERPRET": "1"}
    ranks = str(CONTRACT.with_name("test_all_ranks.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", ranks, "-k", "2-info_nce"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
