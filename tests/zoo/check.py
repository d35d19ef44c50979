"""Try one architecture as a user would: diagnose it, put a cure at every place, train it, and take the cure out again.

Every answer is compared with something that does not come from uncollapse: plain hooks in float64, the model's own
outputs, finite differences. An answer that is wrong and says nothing is a "silent error", the worst outcome.
"""

import re
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import uncollapse as uc

from .entries import Built, Entry
from .reference import (
    Seen,
    all_tensors,
    effective_rank,
    feature_axis,
    first_tensor,
    mean_cosine,
    to_sequences,
    watch,
)
from .results import NOT_BUILT, describe

SCALE = 0.1
COSINE, RANK, SLOPE = 2e-4, 1e-3, 0.02  # allowed differences; of the last two relative
UNSEEN = 0.1  # share of the parameters that may run in series of blocks of which nothing is measured or said
WINDOW = 4  # tokens of a window of local attention, see `transformers_models.OWN`
LEAK = 1e-6  # a change of earlier outputs that rounding can make

Outcome = dict[str, Any]  # status: works, named, refused, failed or silent; and what belongs to it


def check(entry: Entry) -> Outcome:
    """Return what works of an architecture and what does not, step by step."""
    started = time.perf_counter()
    try:
        built = entry.build()
        plain = _outputs(built)
        _outputs(built, number=-1)
    except Exception as error:  # of the library, or the rule for small configs does not fit
        return {"name": entry.name, "kind": entry.kind, NOT_BUILT: describe(error)}
    row: Outcome = {"name": entry.name, "kind": entry.kind, "class": type(built.model).__name__}
    row["parameters"] = sum(p.numel() for p in built.model.parameters())
    row["random"] = not _same(plain, _outputs(built, seed=1))
    row["diagnose"], where, found = _diagnose(built, row["random"])
    found = [part for d in found for part in (d, *d.others)]
    if found:
        row["diagnose"] |= {"layers": sum(len(d.layers) for d in found), "remarks": _remarks(found)}
        problems = _compare(built, found, where, row["diagnose"].get("refused_parts", []))
        if problems:
            row["diagnose"] |= {"status": "silent", "message": problems[0]}
        row |= _attach_everywhere(built, plain, where[0], found[0].settings.get("part"))
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def _call(built: Built, random: bool) -> dict[str, Any]:
    """Return the argument `call` where a model needs one."""

    def seeded(model: nn.Module, batch: Any) -> Any:
        torch.manual_seed(0)
        return built.call(model, batch) if built.call else built.run(batch)

    return {"call": seeded} if random or built.call else {}


def _outputs(built: Built, number: int = 0, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        return [t.clone() for t in all_tensors(built.run(built.batches[number]))]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _diagnose(built: Built, random: bool) -> tuple[Outcome, list[dict[str, Any]], list[Any]]:
    """Diagnose a model without naming anything; if that is refused, with what the message says.

    Returns the outcome, the arguments that were needed for each part, and the diagnoses.
    """
    given = {"tokens": "all", "plan": uc.Plan(rank_samples=64), **_call(built, random)}

    def diagnose(**where: Any) -> Any:
        torch.manual_seed(0)
        return uc.diagnose(built.model, built.batches, **given, **where)

    outcome, d = _attempt(diagnose)
    if d is not None:
        return outcome, [{}], [d]
    tried = [{**where} for where in _names_in(outcome["message"])]
    results = [(where, _attempt(lambda where=where: diagnose(**where))) for where in tried]
    good = [(where, d) for where, (_, d) in results if d is not None]
    if not good:
        again = results[0][1][0] if results else None
        return outcome | ({"advice": again["message"]} if again else {}), [], []
    needs = "; ".join(", ".join(f"{k}={v!r}" for k, v in where.items()) for where, _ in good)
    refused = [where["part"] for where, (_, d) in results if d is None and "part" in where]
    outcome = {**outcome, "status": "named", "needs": needs} | ({"refused_parts": refused} if refused else {})
    return outcome, [where for where, _ in good], [d for _, d in good]


def _names_in(message: str) -> list[dict[str, Any]]:
    """Return the arguments that an error proposes."""
    if parts := re.findall(r"part='([^']*)'", message):
        return [{"part": part} for part in dict.fromkeys(parts)]
    if modules := re.search(r"modules=\[([^\]]*)\]", message):
        names = re.findall(r"'([^']+)'", modules[1])
        return [{"modules": names}] if names else []
    if "layout=" in message:
        return [{"layout": "channels_first"}]
    return []


def _attempt(act: Callable[[], Any]) -> tuple[Outcome, Any]:
    """Run something; an error that uncollapse raised on purpose is a refusal, any other a failure."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = act()
        except Exception as error:
            innermost = traceback.extract_tb(error.__traceback__)[-1]
            on_purpose = "/uncollapse/" in innermost.filename and (innermost.line or "").lstrip().startswith("raise")
            message = f"{type(error).__name__}: {error}"[:1500]
            where = "" if on_purpose else f" ({innermost.filename.rpartition('site-packages/')[2]}:{innermost.lineno})"
            return {"status": "refused" if on_purpose else "failed", "message": message + where}, None
    said = [str(w.message)[:300] for w in caught if "uncollapse" in str(w.filename) or "causal" in str(w.message)]
    return {"status": "works"} | ({"warnings": said} if said else {}), value


def _remarks(found: list[Any]) -> list[str]:
    words = ("taken from the modules", "part of the model", "did not run")
    return [caution for d in found for caution in d.verdict.cautions if any(word in caution for word in words)]


def _compare(built: Built, found: list[Any], where: list[dict[str, Any]], refused: list[str]) -> list[str]:
    """Return where a diagnosis differs from plain hooks, and large series of blocks that it leaves out in silence.

    refused: parts whose diagnosis was refused, which is not silent.
    """
    seen = [_watch(built, number) for number in range(len(built.batches))]
    problems = [problem for d in found for problem in _wrong_layers(built, d, seen)]
    measured = [layer.path for d in found for layer in d.layers]
    said = " ".join(caution for d in found for caution in d.verdict.cautions)
    if not any("modules" in one for one in where):
        missing = {p.partition(" ")[0]: p for p in _left_out(built.model, seen[0], measured)}
        told = {path for path in missing if path in said or any(_touches(path, part) for part in refused)}
        problems += [problem for path, problem in missing.items() if path not in told]
    return problems


def _watch(built: Built, number: int) -> Seen:
    torch.manual_seed(0)
    return watch(built.model, lambda: built.run(built.batches[number]))


def _wrong_layers(built: Built, d: Any, seen: list[Seen]) -> list[str]:
    problems, calls = [], dict[str, int]()
    pooled = "times per batch" in " ".join(d.verdict.cautions)  # it says that all runs are counted
    for layer in d.layers:
        if layer.place != "block":
            continue
        embed, runs = layer.name == "embed", [one.get(layer.path, []) for one in seen]
        call = calls.get(layer.path, 0) if not embed and all(len(run) > 1 for run in runs) else 0
        calls[layer.path] = call + (not embed)
        sides = (0,) if embed else (1, 0) if _is_graph(built) else (1,)  # of graphs, what enters the next layer counts
        chosen = [run if pooled else run[call : call + 1] for run in runs]
        verdicts = [_differs(built, layer, chosen, side) for side in sides]
        if all(verdicts):
            problems.append(f"{layer.label} ({layer.path}): {verdicts[0]}")
    return problems


def _differs(built: Built, layer: Any, runs: list[Any], side: int) -> str:
    """Return how a layer differs from what hooks saw at one side of its module, "" if it does not.

    runs: for each batch, the inputs and outputs of the module.
    """
    found = [(run[side], batch) for batch, own in zip(built.batches, runs, strict=True) for run in own]
    if not found or any(tensor is None for tensor, _ in found):
        return "hooks saw no tensor there"
    axis = feature_axis(found[0][0], found[-1][0] if len(built.batches) > 1 else None)
    sequences = [s for tensor, batch in found for s in _real(tensor, axis, _count(batch), batch)]
    tokens, dim = sum(map(len, sequences)), sequences[0].shape[-1]
    if (layer.tokens, layer.dim) != (tokens, dim):
        return f"{layer.tokens} tokens of {layer.dim} features were measured, hooks saw {tokens} of {dim}"
    several = [s for s in sequences if len(s) > 1]
    for name, function, bound in (("mean_cosine", mean_cosine, COSINE), ("effective_rank", effective_rank, RANK)):
        if name not in layer.measures or not several:
            continue
        expected = statistics.fmean(map(function, several))
        if abs(layer[name] - expected) > bound * max(1.0, abs(expected)):
            return f"{name} {layer[name]:.6g} was measured, hooks saw {expected:.6g}"
    return ""


def _is_graph(built: Built) -> bool:
    return isinstance(built.batches[0], dict) and "edge_index" in built.batches[0]


def _count(batch: Any) -> int:
    """Return the number of samples of a batch."""
    if isinstance(batch, dict) and "edge_index" in batch:
        return -1
    return len(
        next(iter(batch.values())) if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch
    )


def _real(x: Tensor, axis: int, count: int, batch: Any) -> list[Tensor]:
    """Return the real tokens of each sequence; the nodes of each graph."""
    graphs = batch.get("batch") if isinstance(batch, dict) else None
    if graphs is not None and x.dim() == 2:
        return [x.double()[graphs == number] for number in range(int(graphs.max()) + 1)]
    sequences = to_sequences(x, axis, count)
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name) if isinstance(batch, dict) else None
        if mask is not None and x.dim() > 3 and mask.shape == x.shape[:2]:  # several streams of each token
            mask = mask.repeat_interleave(x.shape[2:-1].numel(), 1)
        more = sequences.shape[1] - mask.shape[1] if mask is not None else 0
        images = isinstance(batch, dict) and "pixel_values" in batch  # whose tokens may be a few more by chance
        if mask is not None and 0 < more < WINDOW and not images:  # padded to whole windows, as in Longformer
            mask = torch.nn.functional.pad(mask, (0, more))
        if mask is not None and mask.shape == sequences.shape[:2]:
            return [s[m.bool()] for s, m in zip(sequences, mask, strict=True)]
    return list(sequences)


def _left_out(model: nn.Module, seen: Seen, measured: list[str]) -> list[str]:
    """Return series of blocks that ran, hold a good part of the parameters, and have no measured layer in or around."""
    total = sum(
        p.numel() for m in model.modules() for p in m.parameters(recurse=False) if not isinstance(m, nn.Embedding)
    )
    found = []
    for path, module in model.named_modules():
        items = [f"{path}.{name}".lstrip(".") for name, _ in module.named_children()]
        kinds = {type(child) for child in module.children()}
        is_series = isinstance(module, nn.ModuleList | nn.Sequential) and len(kinds) == 1 and len(items) > 1
        is_stem = any(word in path for word in ("embed", "extract", "stem", "subsampl", "fpn"))
        if not is_series or is_stem or not list(module[0].children()):
            continue
        ran = any(seen.get(item) for item in items)
        share = sum(p.numel() for p in module.parameters()) / max(1, total)
        if ran and share > UNSEEN and not any(_touches(item, m) for item in items for m in measured):
            found.append(
                f"{path} ({len(items)} × {type(module[0]).__name__}, {share:.0%} of the weights) ran and was left out"
            )
    return found


def _touches(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _attach_everywhere(built: Built, plain: list[Tensor], where: dict[str, Any], part: str | None) -> Outcome:
    """Put ContraNorm at each place; check its effect, the order of tokens, gradients, and that nothing is left of it.

    part: what to select in a model of several parts, which `attach` does not choose by itself.
    """
    outcome, places = _attempt(lambda: uc.places(built.model, **where))
    row: Outcome = {"attach": outcome}
    if places is None and part is not None and "several stacks" in outcome["message"]:
        where = {"part": part}
        again, places = _attempt(lambda: uc.places(built.model, **where))
        row["attach"] = again if places is None else {"status": "named", "needs": f"part={part!r}"}
    if places is None:
        return row
    row["places"] = {place: _try_place(built, plain, place, where) for place in places}
    row["gradient"] = _gradient(built, where)
    row["overhead"] = _overhead(built, where)
    return row


def _try_place(built: Built, plain: list[Tensor], place: str, where: dict[str, Any]) -> Outcome:
    before = _fingerprint(built.model)

    def attach_and_run() -> list[Tensor]:
        uc.attach(built.model, "contra_norm", scale=SCALE, at=place, tokens="all", **where)
        return _outputs(built)

    outcome, cured = _attempt(attach_and_run)
    if cured is not None:
        if not all(t.isfinite().all() for t in cured) and all(t.isfinite().all() for t in plain):
            outcome = {"status": "silent", "message": "the output with the cure is not finite"}
        elif _same(plain, cured):
            outcome = _no_effect(built, plain, outcome)
        leak = _leak(built)
    uc.detach(built.model)
    if cured is not None and leak is not None:
        own = _leak(built)
        outcome["leak"] = [own, leak]
        if own is not None and own <= LEAK < leak:
            outcome = {"status": "silent", "message": f"a later token changes earlier outputs by {leak:.2g}", **outcome}
            outcome["status"] = "silent"
    if before != _fingerprint(built.model) or not _same(plain, _outputs(built)):
        return {"status": "silent", "message": "the model differs after the cure was removed"}
    return outcome


def _no_effect(built: Built, plain: list[Tensor], outcome: Outcome) -> Outcome:
    """Return the outcome of a cure that changed nothing: silent, unless it warned or outputs hardly see the blocks.

    In some random models activations vanish: there, noise of a tenth in all outputs of all blocks changes nothing.
    """
    if any("first tensor" in warning for warning in outcome.get("warnings", ())):
        return outcome

    def disturb(module: nn.Module, args: Any, output: Any) -> Any:
        torch.manual_seed(3)
        for tensor in all_tensors(output):
            tensor *= 1 + 0.1 * torch.randn_like(tensor)
        return output

    blocks = {path for path, module in built.model.named_modules() if path and "uncollapse" in module._modules}
    handles = [built.model.get_submodule(path).register_forward_hook(disturb) for path in blocks]
    hidden = all(torch.allclose(x, y) for x, y in zip(plain, _outputs(built), strict=True))
    for handle in handles:
        handle.remove()
    if hidden:
        return outcome | {"note": "the output of this random model does not depend on its blocks"}
    return {"status": "silent", "message": "the cure has no effect on the output"}


def _fingerprint(model: nn.Module) -> Any:
    """Return what must be the same after a cure was removed: names of weights and modules, hooks, modes, classes."""
    hooks = {
        path: (len(m._forward_hooks), len(m._forward_pre_hooks), m.training, type(m))
        for path, m in model.named_modules()
    }
    return list(model.state_dict()), hooks


def _leak(built: Built) -> float | None:
    """Return by how much another last token changes earlier outputs, for models of token ids."""
    batch = built.batches[0]
    name = next((n for n in ("decoder_input_ids", built.ids) if isinstance(batch, dict) and n in batch), None)
    if not name:
        return None
    one = {k: v[:1] if isinstance(v, Tensor) else v for k, v in batch.items()}
    other = {**one, name: one[name].clone()}
    other[name][:, -1] = one[name][:, -1] % 50 + 6
    tensors = []
    for given in (one, other):
        torch.manual_seed(0)
        with torch.no_grad():
            tensors.append(first_tensor(built.run(given)))
    a, b = tensors
    if a is None or b is None or a.dim() != 3 or a.shape != b.shape or a.shape[1] != one[name].shape[1]:
        return None
    return float((a - b)[:, :-1].abs().max()) if a.shape[1] > 1 else None


def _gradient(built: Built, where: dict[str, Any]) -> Outcome:
    """Compare the derivative of the output by a learned scale with a central difference.

    In float64 with a small step; or else in float32 with a larger one, because many models compute norms in float32.
    """
    outcome: Outcome = {}
    slopes = []
    for dtype, step in ((torch.float64, 1e-5), (torch.float32, 5e-3), (torch.float32, 2e-3), (torch.float32, 1e-3)):
        outcome, found = _attempt(lambda dtype=dtype, step=step: _slopes(built, where, dtype, step))
        uc.detach(built.model)
        built.model.float()
        if found is not None:
            exact, near = found
            slopes.append(near)
            if abs(exact - near) <= SLOPE * max(abs(near), 1e-2):
                return outcome
            outcome |= {"status": "silent", "message": f"gradient {exact:.6g}, central difference {near:.6g}"}
    if len(slopes) > 1 and abs(slopes[-1] - slopes[-2]) > SLOPE * abs(slopes[-1]):
        return {"status": "works", "note": "not smooth, as where experts are chosen: central differences disagree"}
    if outcome["status"] == "failed" and not _has_gradient(built):
        return {"status": "works", "note": "the model has no gradient without a cure either"}
    return outcome


def _has_gradient(built: Built) -> bool:
    """Return whether the model itself can be differentiated on its batch."""
    try:
        all_tensors(built.run(built.batches[0]))[0].sum().backward()
    except RuntimeError:
        return False
    built.model.zero_grad()
    return True


def _slopes(built: Built, where: dict[str, Any], dtype: torch.dtype, step: float) -> tuple[float, float]:
    """Return the derivative of a random projection of the output by all learned scales: exact, and by difference."""
    built.model.to(dtype)
    batch = _cast(built.batches[0], dtype)
    weights = uc.attach(built.model, "contra_norm", scale=SCALE, learnable=True, tokens="all", **where).parameters()

    def value() -> Tensor:
        torch.manual_seed(0)
        output = all_tensors(built.run(batch))[0]
        torch.manual_seed(0)
        return (output * torch.randn_like(output)).sum()

    grads = torch.autograd.grad(value(), weights, allow_unused=True)
    ends = []
    for move in (step, -2 * step):
        with torch.no_grad():
            for weight in weights:
                weight += move
            ends.append(float(value()))
    return float(sum(g.sum() for g in grads if g is not None)), (ends[0] - ends[1]) / (2 * step)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    return type(value)(_cast(v, dtype) for v in value) if isinstance(value, tuple | list) else value


def _overhead(built: Built, where: dict[str, Any]) -> Outcome:
    """Return the time of a pass with ContraNorm over that of one without, medians of three."""

    def factor() -> float:
        plain = _time(built)
        with uc.attach(built.model, "contra_norm", scale=SCALE, tokens="all", **where):
            return round(_time(built) / plain, 2)

    outcome, found = _attempt(factor)
    return outcome | ({} if found is None else {"factor": found})


def _time(built: Built) -> float:
    times = []
    for _ in range(4):
        started = time.perf_counter()
        _outputs(built)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
