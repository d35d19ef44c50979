"""Random cures at random places of random models, put in and taken out again: nothing may be left of them.

    PYTHONPATH=tests python -m attachment.fuzzing --cases 300 --out results/attach_fuzz.json

A case is made of its seed alone, so that one that fails can be run by itself: `check_case(17)`.
"""

import argparse
import inspect
import json
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.lab.runs.results import build_record
from uncollapse.registry import CURES

from .tiny_models import BLOCKS, MODELS, Tiny, build

MUST_ACT = ("contra_norm", "pair_norm", "feat_scale", "attn_scale")  # wherever they are, outputs change
MASKED = ("decoder", "decoder_pre_norm")  # that they are causal is known only when they are called
COMMAND = "PYTHONPATH=tests python -m attachment.fuzzing"
MISFITS = 0.1  # share of arguments that do not exist


@dataclass
class Case:
    """What was done: a model, and each cure with its place and options, or why it was refused."""

    seed: int
    model: str
    applied: list[str]
    refused: list[str]


@dataclass(frozen=True)
class Config:
    """Which cases: as many as `cases` with applied cures, from the seed `seed` on."""

    seed: int = 0
    cases: int = 30


class DamageError(AssertionError):
    """A model was not as it had to be; the message begins with the seed of the case."""


def check_case(seed: int) -> Case:
    """Run one case; raises `DamageError` if anything is wrong with it."""
    draw = random.Random(seed)
    name = draw.choice(tuple(MODELS))
    case, tiny = Case(seed, name, [], []), build(name, seed)
    try:
        _run(case, tiny, draw)
    except Exception as error:
        raise DamageError(f"Case {seed}, {case}: {type(error).__name__}: {error}") from error
    return case


def _run(case: Case, tiny: Tiny, draw: random.Random) -> None:
    found, outputs, own = _structure(tiny.model), _outputs(tiny), _weights(tiny.model)
    handles: list[uc.Attachment] = []
    for _ in range(draw.randint(1, 3)):
        cure, asked = _cure(case.model, draw, tiny)
        before = _structure(tiny.model)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The model already has this cure there")
                handles.append(uc.attach(tiny.model, cure, **{**tiny.where, **asked}))
        except ValueError as error:
            case.refused.append(f"{cure} {asked}: {error}")
            _same(before, _structure(tiny.model), "a refused cure changed the model")
            continue
        _learn(handles[-1], draw)
        try:
            _check_attached(tiny, own)
        except (ValueError, RuntimeError) as error:
            if case.model not in MASKED or "later" not in str(error):
                raise
            case.refused.append(f"{cure} {asked}, when called: {error}")
            handles.pop().remove()
            _same(before, _structure(tiny.model), "something is left of a cure that refused to run")
            continue
        case.applied.append(f"{cure} {asked}")
    if any(_must_act(handle) for handle in handles) and all(
        map(torch.equal, outputs.values(), _outputs(tiny).values())
    ):
        raise DamageError("the cures changed nothing")
    draw.shuffle(handles)
    for handle in handles:
        handle.remove()
        _check_attached(tiny, own)
    _same(found, _structure(tiny.model), "something is left of the cures")
    _equal(own, _weights(tiny.model), "weights")
    _equal(outputs, _outputs(tiny), "outputs after removal")


def _must_act(handle: uc.Attachment) -> bool:
    """Return whether outputs have to change; those that only patches made may be read at the class token alone."""
    return handle.cure in MUST_ACT and handle.arguments["tokens"] == "all"


def _cure(model: str, draw: random.Random, tiny: Tiny) -> tuple[str, dict[str, Any]]:
    """Return a cure with random options, at random places of random blocks; some do not fit."""
    cure = draw.choice([*MUST_ACT, *MUST_ACT, *CURES])
    known = uc.places(tiny.model, modules=tiny.where.get("modules"))
    asked: dict[str, Any] = _options(cure, draw)
    if cure in ("contra_norm", "pair_norm", "feat_scale") and draw.random() < 0.9:
        asked["at"] = draw.sample(known, draw.randint(1, min(3, len(known))))
    if cure != "drop_edge" and draw.random() < 0.6:
        asked["layers"] = draw.choice([0, [0, 2], "first 2", "last 1", "1:", slice(None, None, 2), -1])
    if draw.random() < MISFITS:
        asked |= draw.choice([{"at": "attention.nowhere"}, {"at": 7}, {"layers": BLOCKS}, {"layers": "middle 2"}])
    if draw.random() < 0.2:
        asked["tokens"] = "patches"
    return cure, asked


def _options(cure: str, draw: random.Random) -> dict[str, Any]:
    match cure:
        case "contra_norm":
            options = {
                **dict.fromkeys(("dual", "center", "exclude_self", "learnable"), True),
                **{"temperature": draw.choice([0.5, 2.0]), "identity": draw.choice([True, "scale"])},
                **{"average": "unit", "axis": "features", "after": draw.choice(["layer", "l2"])},
            }
            chosen = draw.sample(list(options), draw.choice([0, 1, 1, 2, 3]))
            return {"scale": draw.uniform(0.1, 1.0), **{name: options[name] for name in chosen}}
        case "pair_norm":
            return {"mode": draw.choice(["PN", "SI", "SCS"]), "scale": draw.uniform(0.5, 2.0)}
        case "drop_edge":
            return {"p": draw.choice([0.0, 0.5, 0.9])}
    return {"scale": 0.5} if "scale" in inspect.signature(CURES[cure].layer).parameters else {}


def _learn(handle: uc.Attachment, draw: random.Random) -> None:
    """As if the cure had been trained: those that begin with 0 do something now."""
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    with torch.no_grad():
        for cure in handle.cures.values():
            for parameter in cure.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def _check_attached(tiny: Tiny, own: dict[str, Tensor]) -> None:
    weights = _weights(tiny.model)
    _equal(own, {name: weights[name] for name in weights if ".uncollapse." not in f".{name}"}, "own weights")
    for output in _outputs(tiny).values():
        if not torch.isfinite(output).all():
            raise DamageError("an output is not finite")


def _outputs(tiny: Tiny) -> dict[str, Tensor]:
    """In evaluation and in training mode, and a gradient, always with the same random numbers."""
    found = {}
    weight = next(p for p in tiny.model.parameters() if p.dim() > 1)
    try:
        with torch.random.fork_rng(devices=[]):
            for mode in (False, True):
                torch.default_generator.manual_seed(0)
                tiny.model.train(mode)
                output = tiny.output()
                found[f"output, training {mode}"] = output.detach()
                found[f"gradient, training {mode}"] = torch.autograd.grad(output.square().sum(), [weight])[0]
    finally:
        tiny.model.eval()  # as `build` made it
    return found


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _structure(model: nn.Module) -> dict[str, Any]:
    """Every module with its attributes and how much its dictionaries hold, hooks and children among them."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        plain = (bool, int, float, str, type(None), torch.dtype)
        values = {name: value for name, value in module.__dict__.items() if isinstance(value, plain)}
        sizes = {name: len(value) for name, value in module.__dict__.items() if isinstance(value, dict | list | set)}
        children = {name: id(child) for name, child in module._modules.items()}
        found[path] = (type(module), tuple(module.__dict__), values, sizes, children)
    return found


def _same(before: dict[str, Any], after: dict[str, Any], problem: str) -> None:
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    if changed:
        path = changed[0]
        raise DamageError(f"{problem}: {path or 'the model'} was {before.get(path)} and is {after.get(path)}")


def _equal(before: dict[str, Tensor], after: dict[str, Tensor], what: str) -> None:
    """To the bit, and under the same names."""
    if list(before) != list(after):
        raise DamageError(f"{what}: the names differ in {sorted(set(before) ^ set(after)) or 'their order'}")
    for name, tensor in before.items():
        if not torch.equal(tensor, after[name]):
            raise DamageError(f"{what}: {name} differs")


def fuzz(config: Config) -> dict[str, Any]:
    """Cases until enough of them had a cure that was applied; the record of the run."""
    start, seed = time.perf_counter(), config.seed
    cases: list[Case] = []
    failed: list[str] = []
    while sum(bool(case.applied) for case in cases) + len(failed) < config.cases:
        try:
            cases.append(check_case(seed))
        except DamageError as error:
            failed.append(str(error))
        seed += 1
    applied = [case for case in cases if case.applied]
    kinds = ("applied", "refused")
    figures = {
        "command": f"{COMMAND} --cases {config.cases} --seed {config.seed} --out results/attach_fuzz.json",
        "seeds": [config.seed, seed - 1],
        "passed_with_a_cure": len(applied),
        "passed_all_refused": len(cases) - len(applied),
        "failed": failed,
        "cures": {kind: sum(len(getattr(case, kind)) for case in cases) for kind in kinds},
        "cases_by_model": dict(sorted(Counter(case.model for case in applied).items())),
        **{f"{kind}_by_cure": _by_cure(cases, kind) for kind in kinds},
    }
    libraries = ("transformers", "timm", "torch_geometric")
    return build_record("attach_fuzz", config, time.perf_counter() - start, libraries, **figures)


def _by_cure(cases: list[Case], kind: str) -> dict[str, int]:
    return dict(sorted(Counter(line.partition(" ")[0] for case in cases for line in asdict(case)[kind]).items()))


def main() -> int:
    """Run the fuzz from the command line; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=Config.cases, help="cases with at least one applied cure")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of the first case")
    parser.add_argument("--out", type=Path, help="file for the record, JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = fuzz(Config(given.seed, given.cases))
    text = json.dumps(found, indent=2) + "\n"
    if given.out is None:
        sys.stdout.write(text)
    else:
        given.out.write_text(text)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
