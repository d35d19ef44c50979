"""A few small computations on this machine, beside what has to come out."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from uncollapse import pairwise
from uncollapse.attachment import attach
from uncollapse.cli.health_findings import Finding
from uncollapse.diagnosis import run
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.io.loading import fixed_seed

CHECKS = "Self-check"
ROWS, WIDTH = 600, 32  # more than one tile
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # absolute, of means of unit vectors


def _run_self_checks() -> Iterator[Finding]:
    """The kernel on each device and in each precision, a diagnosis, and a cure."""
    for device in _devices():
        for dtype in ALLOWED:
            name = f"kernel, {device}, {str(dtype).removeprefix('torch.')}"
            yield _run_check(name, lambda device=device, dtype=dtype: _kernel(device, dtype))  # type: ignore[misc]
    yield _run_check("diagnosis", _diagnosis)
    yield _run_check("cure", _cure)


def _run_check(name: str, check: Callable[[], tuple[bool, str]]) -> Finding:
    """What a check found, or what it broke on."""
    remedy = "please report it with the output of `uncollapse doctor --json`"
    try:
        good, words = check()
    except Exception as error:  # a doctor tells, and goes on
        return Finding(CHECKS, name, "bad", f"failed: {' '.join(str(error).split())}", remedy)
    return Finding(CHECKS, name, "good" if good else "bad", words, "" if good else remedy)


def _devices() -> list[str]:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return ["cpu", *(name for name, present in there.items() if present)]


def _kernel(device: str, dtype: torch.dtype) -> tuple[bool, str]:
    """softmax_mean and its gradient beside the plain formula in float64."""
    generator = torch.Generator().manual_seed(0)
    x = nn.functional.normalize(torch.randn(ROWS, WIDTH, generator=generator), dim=-1).to(dtype)
    ours, theirs = (one.detach().requires_grad_() for one in (x.to(device), x.double()))
    mean = pairwise.softmax_mean(ours, ours, ours, temperature=0.5)
    plain = (theirs @ theirs.T / 0.5).softmax(dim=-1) @ theirs
    weights = torch.randn(plain.shape, generator=generator, dtype=torch.float64)
    (slope,) = torch.autograd.grad((mean.float() * weights.to(device, torch.float32)).sum(), ours)
    (right,) = torch.autograd.grad((plain * weights).sum(), theirs)
    error = max(_max_difference(mean, plain), _max_difference(slope, right) / float(weights.abs().max()))
    return error <= ALLOWED[dtype], f"off by {error:.0e} from the plain formula; {ALLOWED[dtype]:.0e} is allowed"


def _max_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().cpu().double() - theirs.detach()).abs().max())


class _Blocks(nn.Module):
    """Linear layers; `alike` is how much of the mean of all tokens each of them leaves in the tokens."""

    def __init__(self, alike: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(3))
        self.alike = alike

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x + self.alike * (x.mean(dim=-2, keepdim=True) - x))
        return x


def _diagnosis() -> tuple[bool, str]:
    """Tokens that stay apart and tokens that are drawn together, told apart."""
    apart, together = (_diagnose_blocks(_Blocks(alike)).verdict for alike in (0.0, 0.999))
    words = f"tokens that stay apart: {apart.kind}; tokens that are drawn together: {together.kind}"
    return not apart.collapsed and together.collapsed, words


def _diagnose_blocks(model: nn.Module) -> Diagnosis:
    batches = [torch.randn(8, 24, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    return run.diagnose(model, batches, modules=["parts.*"], layout="tokens", plan=run.Plan(baseline=0))


def _cure() -> tuple[bool, str]:
    """ContraNorm in a model, which it changes, and out again."""
    with fixed_seed():
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        x = torch.randn(2, 12, 16)
    model = nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        before = model(x)
        with attach.attach(model, "contra_norm", scale=0.5):
            cured = model(x)
        after = model(x)
    changed, clean = not torch.equal(before, cured), torch.equal(before, after)
    return changed and clean, "ContraNorm goes into a model and out again without a trace"
