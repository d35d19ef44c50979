"""Rows that are spread over processes give the loss, the gradients and the metrics of one process with all of them."""

import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import uncollapse as uc
from uncollapse import distributed as processes
from uncollapse.pairwise import all_ranks

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")

ROWS, INPUT, DIM = 23, 6, 5
SHARES = {1: (23,), 2: (14, 9), 4: (11, 0, 1, 11)}  # rows of each process: unequal, one row, none
# "sharp" losses have logits of several hundred, whose rounding in float32 is 1e-5 by itself

Loss = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
QUEUE = torch.randn(7, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

FORMS = ("angular_spread", "decorrelation", "l2_repel", "orthogonalization")


def disperse(form: Any, *given: Any) -> Tensor:
    masked, x, _, _, gather = given if len(given) == 5 else (False, *given)
    return uc.dispersion_loss(x, form, mask=x[:, 0] > 0 if masked else None, gather=gather)


def seeded() -> torch.Generator:
    """Directions that differ from process to process: those of the first must be used."""
    return torch.Generator().manual_seed(processes.rank())


LOSSES: dict[str, Loss] = {
    "info_nce": lambda x, y, tau, g: uc.info_nce(x, y, temperature=tau, gather=g),
    "info_nce symmetric": lambda x, y, tau, g: uc.info_nce(x, y, temperature=tau, symmetric=True, gather=g),
    "info_nce both": lambda x, y, tau, g: uc.info_nce(x, y, temperature=tau, negatives="both", gather=g),
    "info_nce queue": lambda x, y, tau, g: uc.info_nce(x, y, temperature=tau, queue=QUEUE.to(x), gather=g),
    "info_nce given": lambda x, y, tau, g: uc.info_nce(x, y, temperature=tau, negatives=QUEUE.to(x), gather=g),
    "info_nce sharp": lambda x, y, tau, g: uc.info_nce(9 * x, 9 * y, temperature=0.5, normalize=False, gather=g),
    "info_nce sharp symmetric": lambda x, y, tau, g: uc.info_nce(
        9 * x, 9 * y, temperature=0.5, normalize=False, symmetric=True, gather=g
    ),
    "uniform": lambda x, y, tau, g: uc.uniform_loss(x, gather=g),
    "uniform of both views": lambda x, y, tau, g: uc.uniform_loss(x, t=3.0, y=y, gather=g),
    "uniform with self": lambda x, y, tau, g: uc.uniform_loss(x, exclude_self=False, gather=g),
    "uniform of any length": lambda x, y, tau, g: uc.uniform_loss(x, t=0.5, normalize=False, gather=g),
    "uniform queue": lambda x, y, tau, g: uc.uniform_loss(x, queue=QUEUE.to(x), gather=g),
    "uniform queue alone": lambda x, y, tau, g: uc.uniform_loss(x, queue=QUEUE.to(x), within=False, gather=g),
    "uniform of sets": lambda x, y, tau, g: uc.uniform_loss(torch.stack([x, y, x + y], 1), gather=g),
    "contra_uniform": lambda x, y, tau, g: uc.contra_uniform_loss(x, temperature=tau, gather=g),
    "contra_uniform published": lambda x, y, tau, g: uc.contra_uniform_loss(x, form="published", gather=g),
    "contra_uniform features": lambda x, y, tau, g: uc.contra_uniform_loss(x, form="features", gather=g),
    "contra_uniform masked": lambda x, y, tau, g: uc.contra_uniform_loss(x, mask=x[:, 0] > 0, gather=g),
    "contra_uniform of sets": lambda x, y, tau, g: uc.contra_uniform_loss(
        torch.stack([x, y, x + y], 1), mask=torch.stack([x[:, 0] > 0, y[:, 0] > 0, x[:, 1] > 0], 1), gather=g
    ),
    "koleo": lambda x, y, tau, g: uc.koleo_loss(x, gather=g),
    "koleo masked": lambda x, y, tau, g: uc.koleo_loss(x, mask=x[:, 0] > 0, normalize=False, gather=g),
    "koleo of sets": lambda x, y, tau, g: uc.koleo_loss(torch.stack([x, y, x + y], 1), gather=g),
    **{f"dispersion {form}": partial(disperse, form) for form in FORMS},
    **{f"dispersion {form} masked": partial(disperse, form, True) for form in FORMS},
    "dispersion of sets": lambda x, y, tau, g: uc.dispersion_loss(torch.stack([x, y, x + y], 1), gather=g),
    "variance": lambda x, y, tau, g: uc.variance_loss(x, gather=g),
    "variance masked": lambda x, y, tau, g: uc.variance_loss(x, 2.0, mask=x[:, 0] > 0, gather=g),
    "covariance": lambda x, y, tau, g: uc.covariance_loss(x, gather=g),
    "covariance of sets": lambda x, y, tau, g: uc.covariance_loss(torch.stack([x, y, x + y], 1), gather=g),
    "global_orthogonal": lambda x, y, tau, g: uc.global_orthogonal_loss(x, gather=g),
    "global_orthogonal masked": lambda x, y, tau, g: uc.global_orthogonal_loss(x, mask=x[:, 0] > 0, gather=g),
    "sigreg": lambda x, y, tau, g: uc.sigreg_loss(x, slices=9, generator=seeded(), gather=g),
    "sigreg masked": lambda x, y, tau, g: uc.sigreg_loss(x, slices=9, mask=x[:, 0] > 0, generator=seeded(), gather=g),
    "visreg": lambda x, y, tau, g: uc.visreg_loss(x, slices=9, generator=seeded(), gather=g),
    "visreg masked": lambda x, y, tau, g: uc.visreg_loss(x, slices=9, mask=x[:, 0] > 0, generator=seeded(), gather=g),
    "visreg of sets": lambda x, y, tau, g: uc.visreg_loss(
        torch.stack([x, y, x + y], 1), slices=9, generator=seeded(), gather=g
    ),
    "align": lambda x, y, tau, g: uc.align_loss(x, y, alpha=1.5, gather=g),
    "align + uniform": lambda x, y, tau, g: uc.align_loss(x, y, gather=g) + uc.uniform_loss(x, y=y, gather=g),
}

Measure = Callable[[Tensor, Tensor, bool], Tensor]
METRICS: dict[str, Measure] = {
    "alignment": lambda x, y, g: uc.alignment(x, y, gather=g),
    "alignment masked": lambda x, y, g: uc.alignment(x, y, mask=x[:, 0] > 0, gather=g),
    "gram_drift": lambda x, y, g: uc.gram_drift(x, y, gather=g),
    "gram_drift masked": lambda x, y, g: uc.gram_drift(x, y, mask=x[:, 0] > 0, gather=g),
    "uniformity": lambda x, y, g: uc.uniformity(x, gather=g),
    "uniformity masked": lambda x, y, g: uc.uniformity(x, mask=x[:, 0] > 0, gather=g),
    "pairwise_potential": lambda x, y, g: uc.pairwise_potential(x, normalize=False, gather=g),
    "mean_cosine": lambda x, y, g: uc.mean_cosine(x, gather=g),
    "mean_cosine centred": lambda x, y, g: uc.mean_cosine(x, x[:, 0] > 0, center=True, gather=g),
    "mean_cosine absolute": lambda x, y, g: uc.mean_cosine(x, absolute=True, gather=g),
    "token_variance": lambda x, y, g: uc.token_variance(x, gather=g),
    "feature_variance": lambda x, y, g: uc.feature_variance(x, gather=g),
    "feature_correlation": lambda x, y, g: uc.feature_correlation(x, gather=g),
    "outlier_share": lambda x, y, g: uc.outlier_share(x, k=2, gather=g),
    "effective_rank": lambda x, y, g: uc.effective_rank(x, gather=g),
    "effective_rank centred": lambda x, y, g: uc.effective_rank(x, x[:, 0] > 0, center=True, gather=g),
    "stable_rank": lambda x, y, g: uc.stable_rank(x, gather=g),
    "participation_ratio": lambda x, y, g: uc.participation_ratio(x, center=True, gather=g),
    "rankme": lambda x, y, g: uc.rankme(x, gather=g),
    "rankme few rows": lambda x, y, g: uc.rankme(x, x[:, 0] > x.new_tensor(0.9), eps=0.1, gather=g),
    "alpha_req": lambda x, y, g: uc.alpha_req(x, gather=g),
    "lidar": lambda x, y, g: uc.lidar(torch.stack([x, y], 1), gather=g),
    "group_distance_ratio": lambda x, y, g: uc.group_distance_ratio(
        x, (x[:, 0] > 0).long() + 4 * (x[:, 1] > 1), gather=g
    ),
}
ONE_SET = [name for name in (*LOSSES, *METRICS) if "of sets" not in name]


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two views (ROWS, INPUT); the first rows of the second one are those of the first, one row is zero."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, INPUT, generator=generator, dtype=torch.float64)
    y = x + 0.4 * torch.randn(ROWS, INPUT, generator=generator, dtype=torch.float64)
    y[:2], x[-1] = x[:2], 0
    return x.to(dtype), y.to(dtype)


class Encoder(nn.Module):
    """Two layers, and the temperature as a parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(INPUT, 8), nn.Tanh(), nn.Linear(8, DIM)).to(dtype)
        self.tau = nn.Parameter(torch.tensor(0.3, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layers(x), self.layers(y), self.tau * 1


def learned(name: str, dtype: torch.dtype, x: Tensor, y: Tensor, gather: bool) -> dict[str, Any]:
    """The loss and the gradients of all parameters."""
    encoder = Encoder(dtype)
    model = DistributedDataParallel(encoder) if gather else encoder
    first, second, tau = model(x, y)
    value = LOSSES[name](first, second, tau, gather)
    (value + 0 * (tau + second.sum())).backward()  # so that each parameter has a gradient
    return {"value": value.detach()} | {key: p.grad for key, p in encoder.named_parameters()}


def found_by(share: slice, gather: bool) -> dict[str, Any]:
    """All that is compared, for some of the rows."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64):
        x, y = (view[share] for view in data(dtype))
        for name in LOSSES:
            found[f"{name}, {dtype}"] = learned(name, dtype, x, y, gather)
        with torch.no_grad():
            for name, measure in METRICS.items():
                found[f"{name}, {dtype}"] = {"value": measure(x[:, :DIM], y[:, :DIM], gather)}
    return found


def refusal(name: str, kind: str, rank: int) -> str:
    """What is raised if the first process has other features or another dtype than the rest; "" for nothing."""
    dtype = torch.float64 if kind == "dtype" and rank == 0 else torch.float32
    x = torch.randn(6, DIM + (kind == "width" and rank == 0), dtype=dtype)
    try:
        LOSSES[name](x, x, torch.tensor(0.3), True) if name in LOSSES else METRICS[name](x, x, True)
    except ValueError as error:
        return str(error)
    return ""


def process(rank: int, count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    shares = SHARES[count]
    found = found_by(slice(sum(shares[:rank]), sum(shares[: rank + 1])), gather=True)
    found["everywhere"] = processes.gather_objects(rank)
    with pytest.raises((ZeroDivisionError, processes.PeerError)) as told:
        processes.on_rank_zero(lambda: 1 // 0)
    found["error"] = str(told.value)
    found["refusals"] = {
        name: {kind: refusal(name, kind, rank) for kind in ("width", "dtype")} for name in ONE_SET if count > 1
    }
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()  # neither leaves while another still talks to it
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[1, 2, 4])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of several processes found."""
    count, folder = request.param, tmp_path_factory.mktemp("ring")
    commands = [[sys.executable, __file__, str(rank), str(count), str(folder)] for rank in range(count)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for each in started:
            problems = each.communicate(timeout=240)[1]
            assert each.returncode == 0, problems
    finally:
        for each in started:
            each.kill()  # those that wait for another
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return found_by(slice(0, ROWS), gather=False)


@pytest.mark.parametrize("name", [*LOSSES, *METRICS])
def test_as_in_one_process(name: str, several: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for dtype, bound in ((torch.float32, 1e-5 if "sharp" in name else 1e-6), (torch.float64, 1e-12)):
        expected = alone[f"{name}, {dtype}"]
        for found in several:
            for key, value in found[f"{name}, {dtype}"].items():
                scale = max(1.0, float(expected[key].abs().max()))
                assert float((value - expected[key]).abs().max()) <= bound * scale, (dtype, key)


@pytest.mark.parametrize("name", ONE_SET)
def test_rows_that_differ_are_refused_in_every_process(name: str, several: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(several if len(several) > 1 else ()):
        for kind, words in (("width", f"of {DIM + 1}, 2-d float32 of {DIM}"), ("dtype", "2-d float64 of")):
            assert words.replace("2-d", "3-d" if name == "lidar" else "2-d") in found["refusals"][name][kind], rank


def test_every_process_learns_of_the_others(several: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(several):
        assert found["everywhere"] == list(range(len(several)))
        assert ("in the first process: ZeroDivisionError" in found["error"]) == (rank > 0)


def test_each_loss_with_negatives_and_each_metric_of_rows_gathers() -> None:
    gathering = {name for name, entry in uc.METRICS.items() if "gather" in inspect.signature(entry.function).parameters}
    whole = {name for name, entry in uc.METRICS.items() if not {"edges", "attention", "patches"} & set(entry.needs)}
    assert gathering == whole == {name.split()[0] for name in METRICS}
    losses = {name for name, entry in uc.LOSSES.items() if "gather" in inspect.signature(entry.function).parameters}
    own = {"patch_cosine_loss", "patch_contrastive_loss", "patch_mixing_loss", "gram_anchor_loss"}  # an image at a time
    assert losses == set(uc.LOSSES) - own


@pytest.mark.parametrize("name", [*LOSSES, *METRICS])
def test_without_a_launcher_gather_changes_nothing(name: str) -> None:
    x, y = data(torch.float64)
    x, y, tau = x[:, :DIM], y[:, :DIM], torch.tensor(0.3)
    if name in LOSSES:
        assert torch.equal(LOSSES[name](x, y, tau, True), LOSSES[name](x, y, tau, False))
    else:
        torch.testing.assert_close(METRICS[name](x, y, True), METRICS[name](x, y, False), rtol=1e-12, atol=1e-12)


def test_only_rows_of_one_set_are_gathered() -> None:
    x = torch.randn(2, 4, 3)
    for measure in (uc.uniformity, uc.mean_cosine, uc.effective_rank, uc.token_variance):
        with pytest.raises(ValueError, match="one set"):
            measure(x, gather=True)


def test_sums_of_nothing() -> None:
    nothing = torch.full((3,), -math.inf, requires_grad=True)
    joined = all_ranks.log_add(nothing, torch.full((3,), -math.inf))
    joined.masked_fill(joined.isneginf(), 0).sum().backward()
    assert joined.isneginf().all()
    assert nothing.grad is not None
    assert torch.equal(nothing.grad, torch.zeros(3))


if __name__ == "__main__":
    process(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)  # all is saved; threads of gloo may still run, and an interpreter that ends under them aborts
