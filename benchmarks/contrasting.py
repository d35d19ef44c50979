"""A training step of the recipe contrast: which share of it the loss takes, images per second, and its memory."""

import statistics
from collections.abc import Callable, Iterator
from time import perf_counter

import torch

from benchmarks.measure import peak_memory
from benchmarks.targets import SETUP, Result
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive.objectives import ObjectiveConfig, objective

BATCHES = (1024, 4096)
WAYS = {
    "InfoNCE both ways": ObjectiveConfig(),
    "NT-Xent": ObjectiveConfig(negatives="both"),
    "alignment and uniformity": ObjectiveConfig(contrast=0.0, align=1.0, uniform=1.0),
}


def shares(rounds: int = 3) -> Iterator[Result]:
    """Whole steps but for reading images: two views of each, forward and backward passes, SGD."""
    for batch in BATCHES:
        for precision in ("no", "bf16"):
            run = step(batch, precision)
            run()
            network, *losses = zip(*(run() for _ in range(rounds)), strict=True)
            for name, loss in zip(WAYS, losses, strict=True):
                yield _share(name, batch, precision, network, loss)
    body = "from benchmarks import contrasting\ncontrasting.step(n, 'no')()"
    taken = peak_memory(SETUP, body, 16, BATCHES[-1])
    yield Result(f"peak memory of a step, {BATCHES[-1]} images, float32", None, taken, "MiB", False, "all of it")


def _share(name: str, batch: int, precision: str, network: tuple[float, ...], loss: tuple[float, ...]) -> Result:
    share = statistics.median(part / (part + rest) for part, rest in zip(loss, network, strict=True))
    whole, part = statistics.median(map(sum, zip(loss, network, strict=True))), statistics.median(loss)
    detail = f"{part * 1e3:.0f} ms of {whole:.2f} s, {batch / whole:.0f} images/s"
    kind = "float32" if precision == "no" else precision
    what = f"{name} in a step of {batch} images of 32×32, quarter-width AlexNet, {kind}"
    return Result(what, 0.1, share, "of the step", False, detail)


def step(batch: int, precision: str) -> Callable[[], list[float]]:
    """A step as the recipe takes it. It gives the seconds of all but the loss, and those of each loss of `WAYS`."""
    config = contrast.Config(side=32, width=0.25, batch=batch, precision=precision)
    encoder = contrastive.build_encoder(config).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimiser = torch.optim.SGD(encoder.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay)
    change = config.augmentation.steps(config.input_spec, crop=True)
    images = torch.randint(256, (batch, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def run() -> list[float]:
        start = perf_counter()
        optimiser.zero_grad()
        views = torch.cat([change(images), change(images)]).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            outputs = encoder(views).float()
        network, losses = perf_counter() - start, []
        for way in WAYS.values():
            cut, start = outputs.detach().requires_grad_(), perf_counter()
            torch.autograd.backward(objective(way, *cut.chunk(2)))
            losses.append(perf_counter() - start)
        start = perf_counter()
        outputs.backward(cut.grad)
        optimiser.step()
        return [network + perf_counter() - start, *losses]

    return run
