"""The command `uncollapse doctor`: check the installation, the machine and a few small computations."""

import dataclasses
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uncollapse import __version__
from uncollapse.cli import console
from uncollapse.cli.demo import INSTALL_MINILM, minilm_folder
from uncollapse.cli.options import flag
from uncollapse.cli.progress import ProgressBar
from uncollapse.errors import UsageError
from uncollapse.io import files

if TYPE_CHECKING:
    import torch

    from uncollapse.diagnosis.result import Verdict

State = Literal["good", "missing", "bad"]
VERSIONS, DEVICES, EXTRAS, FILES, CHECKS = "Versions", "Devices", "Optional parts", "Files", "Self-check"
MARKS = {"good": ("✓", "green"), "missing": ("–", "yellow"), "bad": ("✗", "bold red")}
NAME_WIDTH = 24  # columns

REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*])?\s*\(?(?:>=\s*([\w.]+))?")
EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
MODULES = {"scikit-learn": "sklearn", "pyyaml": "yaml", "pillow": "PIL"}  # where the module has another name
USES = {  # the extras that users choose from, and what they are for
    "hf": "HuggingFace models",
    "st": "final embeddings, evaluators and losses of sentence-transformers",
    "gguf": "models in .gguf files",
    "timm": "vision models from timm",
    "pyg": "graph models from PyG",
    "train": "the recipes of `uncollapse train`",
    "text": "recipes on sentences",
    "data": "images, parquet and HDF5 files",
    "report": "the HTML report and plots; writing them needs no browser",
    "tune": "the search of `uncollapse tune`",
    "dask": "embeddings spread over several machines",
    "triton": "the fused kernels on GPUs",
}

LOW_DISK_SPACE = 2**30  # bytes
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
YES = ("1", "true", "yes", "on")

ROWS, WIDTH = 600, 32  # more than one tile
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}  # absolute, for means of unit vectors
PASTE_IT = "please report it with the lines above."
REPORT_IT = "please report it with the output of `uncollapse doctor --json`"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        group: the heading under which it is printed.
        name: what was checked.
        state: good, missing (something optional is not installed) or bad.
        words: what was found.
        remedy: what to do about it, if anything.
    """

    group: str
    name: str
    state: State
    words: str
    remedy: str = ""


@dataclass(frozen=True)
class Requirement:
    """A required library. extra: the extra that installs it, None if every installation has it."""

    name: str
    least: str | None
    extra: str | None


def doctor(
    as_json: Annotated[bool, flag("--json", "Print the findings as JSON and nothing else.")] = False,
    gpu: Annotated[bool, flag("--gpu", "Verify and time the kernels on this GPU, as text for an issue.")] = False,
) -> None:
    """Check the installation: versions, devices, optional libraries and how to install them, and a self-test."""
    if gpu:
        _report_gpu(as_json)
    found = []
    with ProgressBar() as bar:
        bar.stage("Checking")
        for finding in examine():
            found.append(finding)
            bar.stage(f"Checked: {finding.name}")
    if as_json:
        facts = {"healthy": not _bad(found), "findings": [dataclasses.asdict(finding) for finding in found]}
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _print(found)
    raise typer.Exit(1 if _bad(found) else 0)


def _report_gpu(as_json: bool) -> NoReturn:
    """Print the report of the GPU and exit."""
    from uncollapse.cli.doctor_gpu import check_gpu

    if as_json:
        raise UsageError("--gpu prints text to paste into an issue; remove --json.")
    good = True
    for line, fine in check_gpu():
        typer.echo(line)
        good = good and fine
    typer.echo("All kernels agree with torch." if good else f"Some kernels do not work here: {PASTE_IT}")
    raise typer.Exit(0 if good else 1)


def examine() -> Iterator[Finding]:
    """Yield all findings, each as soon as it is known."""
    yield from _check_versions()
    yield from _check_devices()
    yield from _check_extras()
    yield from _check_folders()
    yield from _run_self_checks()


def _bad(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.state == "bad"]


def _print(found: list[Finding]) -> None:
    terminal = console.stdout_console()
    for group in dict.fromkeys(finding.group for finding in found):
        terminal.print(Text(group, style="bold"))
        for finding in found:
            if finding.group == group:
                _print_finding(terminal, finding)
    console.print_paragraph(terminal, _summary(found), style="bold red" if _bad(found) else "bold green")


def _print_finding(terminal: Console, finding: Finding) -> None:
    """Print the mark, the name and what was found; below it what to do."""
    sign, style = MARKS[finding.state]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=3, justify="right")
    grid.add_column(width=NAME_WIDTH, no_wrap=True)
    grid.add_row(Text(sign, style=style), Text(finding.name), Text(finding.words))
    if finding.remedy:
        grid.add_row("", "", Text(f"→ {finding.remedy}", style="cyan"))
    terminal.print(grid)


def _summary(found: list[Finding]) -> str:
    if bad := _bad(found):
        return f"Problems: {', '.join(finding.name for finding in bad)}. The arrows say what to do."
    absent = [finding.name for finding in found if finding.state == "missing" and finding.remedy]
    return f"All is well. Optional and not fully installed: {', '.join(absent)}." if absent else "All is well."


def _check_versions() -> Iterator[Finding]:
    """Check Python, the package, and the libraries that every installation has."""
    yield Finding(VERSIONS, "python", "good", platform.python_version())
    yield Finding(VERSIONS, "uncollapse", "good", __version__)
    for requirement in _requirements():
        if requirement.extra is None:
            state, words = _check_requirement(requirement)
            remedy = "" if state == "good" else f'pip install -U "{requirement.name}"'
            yield Finding(VERSIONS, requirement.name, "good" if state == "good" else "bad", words, remedy)


def _check_extras() -> Iterator[Finding]:
    """Check whether the libraries of each extra are installed and can be imported."""
    yield from _check_torchvision()
    wanted = _requirements()
    for extra, use in USES.items():
        own = [requirement for requirement in wanted if requirement.extra == extra and requirement.name != "uncollapse"]
        checked = [(one.name, *_check_requirement(one)) for one in own]
        if not checked:
            continue
        states = {state for _, state, _ in checked}
        state: State = "bad" if "bad" in states else "missing" if "missing" in states else "good"
        words = f"{use}: {_list_libraries(checked)}"
        yield Finding(EXTRAS, extra, state, words, "" if state == "good" else f'pip install "uncollapse[{extra}]"')


def _list_libraries(checked: list[tuple[str, State, str]]) -> str:
    """Return what was found, and then the names of all that is not installed."""
    missing = [name for name, state, _ in checked if state == "missing"]
    found = [f"{name} {words}" for name, state, words in checked if state != "missing"]
    return ", ".join(found + [f"not installed: {', '.join(missing)}"] * bool(missing))


def _requirements() -> list[Requirement]:
    """Return what the package's metadata requires; nothing if the package is not installed."""
    try:
        lines = metadata.requires("uncollapse") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        name, least = REQUIREMENT.match(line).groups()  # type: ignore[union-attr]
        extra = EXTRA.search(line)
        found.append(Requirement(name, least, extra.group(1) if extra else None))
    return found


def _check_requirement(requirement: Requirement) -> tuple[State, str]:
    """Return the state of a library and its version, or what is wrong with it."""
    from uncollapse.io.loading import silence_libraries

    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "missing", "is not installed"
    if requirement.least is not None and _numbers(version) < _numbers(requirement.least):
        return "bad", f"{version} is too old, {requirement.least} or later is needed"
    try:
        with silence_libraries():
            import_module(MODULES.get(requirement.name.lower(), requirement.name.replace("-", "_")))
    except Exception as error:  # a broken installation may raise anything
        return "bad", f"{version} cannot be imported: {' '.join(str(error).split())[:200]}"
    return "good", version


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return (*numbers, *[0] * (3 - len(numbers)))  # 2.0 is as new as 2.0.0


def _check_torchvision() -> Iterator[Finding]:
    """Check torchvision, which no extra installs but timm and transformers import."""
    from uncollapse.backbones import torchvision_ops

    if find_spec("torchvision") is None:
        return
    torchvision_ops.declare()
    version = metadata.version("torchvision")
    if torchvision_ops.is_declared():
        words = f"{version} was built for another torch: commands work, but `import timm` in your own code may fail"
        remedy = "install the one for your torch, or call uncollapse.backbones.torchvision_ops.declare() first"
        yield Finding(EXTRAS, "torchvision", "missing", words, remedy)
    else:
        yield Finding(EXTRAS, "torchvision", "good", version)


def _check_devices() -> Iterator[Finding]:
    """List the processor and the accelerators that torch sees."""
    import torch

    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} used by torch"
    yield Finding(DEVICES, "cpu", "good", threads)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield Finding(DEVICES, "cuda", "good" if names else "missing", ", ".join(names) or "torch sees no GPU")
    mps = torch.backends.mps.is_available()
    yield Finding(DEVICES, "mps", "good" if mps else "missing", "available" if mps else "only on a Mac")
    several = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    words = "torch has gloo, so `torchrun` works" if several else "this torch is built without gloo"
    yield Finding(DEVICES, "several processes", "good" if several else "missing", words)


def _check_folders() -> Iterator[Finding]:
    """Check the folders that commands write to, the hub's cache and the demo's model."""
    yield _check_folder("here", Path.cwd(), "results and reports go below this folder")
    yield _check_folder("cache", files.user_cache(), "downloads and cached data; UNCOLLAPSE_CACHE names another folder")
    if find_spec("huggingface_hub") is not None:
        yield _check_hub()
    found, words = minilm_folder(), "the real model of `uncollapse demo`"
    if found:
        yield Finding(FILES, "MiniLM", "good", words)
    else:
        yield Finding(FILES, "MiniLM", "missing", f"{words} is not installed", INSTALL_MINILM)


def _check_folder(name: str, folder: Path, use: str) -> Finding:
    """Check whether a folder can be written to. No file is left there."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        words = f"{folder} cannot be written to: {error.strerror}"
        return Finding(FILES, name, "bad", words, "work in another folder" if name == "here" else use)
    words, low = f"{folder}, {free / 2**30:.1f} GiB free: {use}", free < LOW_DISK_SPACE
    return Finding(FILES, name, "bad" if low else "good", words, "free some space on that disk" if low else "")


def _check_hub() -> Finding:
    """Report where models from the hub are cached, and whether others may be downloaded. Nothing is sent anywhere."""
    from huggingface_hub import constants

    count = len(list(Path(constants.HF_HUB_CACHE).glob("models--*")))
    variable = next((name for name in OFFLINE if os.environ.get(name, "").lower() in YES), None)
    words = f"{count} {'model' if count == 1 else 'models'} in {constants.HF_HUB_CACHE}"
    if variable:
        words = f"{words}; {variable} is set, so no others are downloaded"
        return Finding(FILES, "hub", "missing", words, f"unset {variable}")
    return Finding(FILES, "hub", "good", f"{words}; others are downloaded by name (HF_HUB_OFFLINE=1 forbids it)")


def _run_self_checks() -> Iterator[Finding]:
    """Check the kernel on each device and in each precision, a diagnosis, and a cure."""
    import torch

    others = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    for device in ["cpu", *(name for name, present in others.items() if present)]:
        for dtype in TOLERANCE:
            check = lambda device=device, dtype=dtype: _check_kernel(device, dtype)  # noqa: E731
            yield _run_check(f"kernel, {device}, {dtype}", check)
    yield _run_check("diagnosis", _check_diagnosis)
    yield _run_check("cure", _check_cure)


def _run_check(name: str, check: Callable[[], tuple[bool, str]]) -> Finding:
    """Return what a check found, or the error that it raised."""
    try:
        good, words = check()
    except Exception as error:  # the other checks still run
        return Finding(CHECKS, name, "bad", f"failed: {' '.join(str(error).split())}", REPORT_IT)
    return Finding(CHECKS, name, "good" if good else "bad", words, "" if good else REPORT_IT)


def _check_kernel(device: str, dtype_name: str) -> tuple[bool, str]:
    """Compare softmax_mean and its gradient with the plain formula in float64."""
    import torch
    from torch import nn

    from uncollapse import pairwise

    dtype, tolerance = getattr(torch, dtype_name), TOLERANCE[dtype_name]
    generator = torch.Generator().manual_seed(0)
    x = nn.functional.normalize(torch.randn(ROWS, WIDTH, generator=generator), dim=-1).to(dtype)
    ours, theirs = (one.detach().requires_grad_() for one in (x.to(device), x.double()))
    mean = pairwise.softmax_mean(ours, ours, ours, temperature=0.5)
    plain = (theirs @ theirs.T / 0.5).softmax(dim=-1) @ theirs
    weights = torch.randn(plain.shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((mean.float() * weights.to(device, torch.float32)).sum(), ours)
    (expected,) = torch.autograd.grad((plain * weights).sum(), theirs)
    error = max(_max_difference(mean, plain), _max_difference(gradient, expected) / float(weights.abs().max()))
    return error <= tolerance, f"differs by {error:.0e} from the plain formula; {tolerance:.0e} is allowed"


def _max_difference(ours: "torch.Tensor", theirs: "torch.Tensor") -> float:
    return float((ours.detach().cpu().double() - theirs.detach()).abs().max())


def _check_diagnosis() -> tuple[bool, str]:
    """Diagnose tokens that stay distinct and tokens that become alike."""
    distinct, alike = (_diagnose_averaging(weight) for weight in (0.0, 0.999))
    words = f"tokens that stay distinct: {distinct.kind}; tokens that become alike: {alike.kind}"
    return not distinct.collapsed and alike.collapsed, words


def _diagnose_averaging(weight: float) -> "Verdict":
    """Return the verdict on three blocks that move each token by `weight` towards the mean of all tokens."""
    import torch
    from torch import nn

    from uncollapse.diagnosis.run import diagnose
    from uncollapse.diagnosis.target import Plan

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Identity() for _ in range(3))

        def forward(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x + weight * (x.mean(dim=-2, keepdim=True) - x))
            return x

    batches = [torch.randn(8, 24, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    return diagnose(Blocks(), batches, modules=["parts.*"], layout="tokens", plan=Plan(baseline=0)).verdict


def _check_cure() -> tuple[bool, str]:
    """Attach ContraNorm to a model, which changes its output, and remove it again, which restores it to the bit."""
    import torch
    from torch import nn

    from uncollapse.attachment.attach import attach
    from uncollapse.io.loading import fixed_seed

    with fixed_seed():
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        x = torch.randn(2, 12, 16)
    model = nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        before = model(x)
        with attach(model, "contra_norm", scale=0.5):
            cured = model(x)
        after = model(x)
    good = not torch.equal(before, cured) and torch.equal(before, after)
    return good, "attaching ContraNorm changes a model, and removing it restores it exactly"
