"""What is installed: the package, what it needs, and the optional libraries with the extras that bring them."""

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

from uncollapse import __version__
from uncollapse.backbones import torchvision_ops
from uncollapse.cli.health_findings import Finding, State
from uncollapse.io.loading import silence_libraries

VERSIONS, EXTRAS = "Versions", "Optional parts"
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*])?\s*\(?(?:>=\s*([\w.]+))?")
EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
MODULES = {"scikit-learn": "sklearn", "pyyaml": "yaml", "pillow": "PIL"}  # where the name of the module is another one
USES = {  # the extras that users choose among, and what for
    "hf": "HuggingFace models",
    "gguf": "models in .gguf files",
    "timm": "vision models of timm",
    "pyg": "graph models of PyG",
    "train": "the recipes of `uncollapse train`",
    "text": "recipes on sentences",
    "data": "images, parquet and HDF5 files",
    "report": "the HTML report and plots; no browser is needed to write them",
    "tune": "the search of `uncollapse tune`",
    "dask": "embeddings over several machines",
}


@dataclass(frozen=True)
class Requirement:
    """A library that is asked for. extra: which brings it, None if all installations have it."""

    name: str
    least: str | None
    extra: str | None


def _check_versions() -> Iterator[Finding]:
    """Python, the package, and the libraries that every installation has."""
    yield Finding(VERSIONS, "python", "good", platform.python_version())
    yield Finding(VERSIONS, "uncollapse", "good", __version__)
    for requirement in _requirements():
        if requirement.extra is None:
            state, words = _check_requirement(requirement)
            remedy = "" if state == "good" else f'pip install -U "{requirement.name}"'
            yield Finding(VERSIONS, requirement.name, "good" if state == "good" else "bad", words, remedy)


def _check_extras() -> Iterator[Finding]:
    """The extras: whether their libraries are there and can be imported."""
    yield from _torchvision()
    wanted = _requirements()
    for extra, use in USES.items():
        own = [requirement for requirement in wanted if requirement.extra == extra and requirement.name != "uncollapse"]
        looked = [(one.name, *_check_requirement(one)) for one in own]
        if not looked:
            continue
        states = {state for _, state, _ in looked}
        state: State = "bad" if "bad" in states else "missing" if "missing" in states else "good"
        words = f"{use}: {', '.join(f'{name} {words}' for name, _, words in looked)}"
        yield Finding(EXTRAS, extra, state, words, "" if state == "good" else f'pip install -U "uncollapse[{extra}]"')


def _requirements() -> list[Requirement]:
    """What the metadata of the package asks for; nothing where it runs without being installed."""
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
    """Its version, or what is wrong with it."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "missing", "is not installed"
    if requirement.least is not None and _numbers(version) < _numbers(requirement.least):
        return "bad", f"{version} is too old, {requirement.least} or later is needed"
    try:
        with silence_libraries():
            import_module(MODULES.get(requirement.name.lower(), requirement.name.replace("-", "_")))
    except Exception as error:  # whatever an installation that is broken comes up with
        return "bad", f"{version} cannot be imported: {' '.join(str(error).split())[:200]}"
    return "good", version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _torchvision() -> Iterator[Finding]:
    """torchvision is nobody's extra, but timm and transformers import it."""
    if find_spec("torchvision") is None:
        return
    torchvision_ops.declare()
    version = metadata.version("torchvision")
    if torchvision_ops.is_declared():
        words = (
            f"{version} was built for another torch: commands work all the same, `import timm` in your code may fail"
        )
        remedy = (
            "install the one that belongs to your torch, or call uncollapse.backbones.torchvision_ops.declare() before"
        )
        yield Finding(EXTRAS, "torchvision", "missing", words, remedy)
    else:
        yield Finding(EXTRAS, "torchvision", "good", version)
