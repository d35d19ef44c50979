"""Diagnose a model: run it over batches under hooks, measure every layer, and build the Diagnosis."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse import backbones, distributed
from uncollapse.attachment.attach import attachments
from uncollapse.backbones import forward
from uncollapse.backbones.forward import group_texts
from uncollapse.backbones.nonfinite import first_fault
from uncollapse.backbones.select import At, Layers, TokenChoice
from uncollapse.backbones.sites import OUTPUT, Layout, MisfitError
from uncollapse.diagnosis.build import Labels, Measured, build, check_enough, settings_of
from uncollapse.diagnosis.capture import Capture
from uncollapse.diagnosis.part_probe import Loss, PartProbe
from uncollapse.diagnosis.parts import Parts
from uncollapse.diagnosis.result import Diagnosis, Layer
from uncollapse.diagnosis.sentences import SentenceRows
from uncollapse.diagnosis.stats.streaming import next_view
from uncollapse.diagnosis.target import Plan, Target, find_target
from uncollapse.diagnosis.verdict import Subject
from uncollapse.errors import NotFiniteError


@dataclass
class Counts:
    """How many batches there were.

    batches: those that were measured. skipped: left out, as empty or only padding. unpaired: measured, but their second
    view is only padding. spare: in how many processes second views were left over.
    """

    batches: int = 0
    skipped: int = 0
    unpaired: int = 0
    spare: int = 0


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Layers | None = None,
    at: At = OUTPUT,
    modules: str | Sequence[str] | None = None,
    part: str | None = None,
    tokens: TokenChoice = "patches",
    layout: Layout | None = None,
    attention: bool = False,
    causes: bool = False,
    loss: Loss | None = None,
    pairs: Iterable[Any] | None = None,
    device: torch.device | str | None = None,
    call: forward.Call = forward.run,
    labels: Labels | None = None,
    plan: Plan = Plan(),
    gather: bool = False,
) -> Diagnosis:
    """Measure every layer of a model on some batches, and report where and how its representations collapse.

    The model does not change: hooks are removed, and its mode, device, dtype and the random states are restored. There
    is one pass over the batches, and memory does not grow with their number. To measure only some batches, or to show
    progress, wrap them: `itertools.islice(loader, 20)`, `tqdm(loader)`.

    Args:
        model: a HuggingFace, timm, PyG or torch model, or any module with `modules`; it may be wrapped in your own. For
            a SentenceTransformer, the tokens of each block and the final embeddings are measured.
        batches: what the model takes: tensors, mappings of arguments, tuples (as many elements are passed as the
            model's forward requires), or PyG data objects; for a SentenceTransformer, texts or lists of texts.
        layers: blocks to measure, counted from 0, or from the end if negative: a number, a slice, "first", "last",
            "first 4", "last 4" or "4:8", "embed" for the input of block 0, "final" for the output of the final norm, or
            a list of these; all if not given.
        at: one or several places in each block, from `uc.places(model)`. "block" is the residual stream after the block
            and is always measured, because the verdict is based on it; "attention.residual" and "mlp.residual" are
            after the attention and after the MLP.
        modules: names or patterns of the modules to treat as blocks in an unknown model ("blocks.*"). If not given, the
            outermost series of blocks is used, and a note says which one.
        part: the part to measure in a model with several stacks of blocks, such as "vision_model". If not given, all
            parts that run are measured: the diagnosis is about the first one, and `others` has those of the others.
        tokens: "patches" leaves out CLS, distillation and register tokens; "all" includes them.
        layout: the layout of the outputs of `modules`: "tokens" (b, n, d), "sequence_first" (n, b, d), "vectors"
            (b, d), "channels_first" (b, d, h, w), "channels_last" (b, h, w, d), "nodes" (n, d). If not given, it
            depends on the number of dimensions, and for images on the modules in the block.
        attention: also measure attention maps. If the model uses torch's fused attention, its maps are computed tile by
            tile and never stored; other models return whole maps.
        causes: also look for the cause, on the first batch: the effect of each part of a block, what the residual
            carries, gradient norms, and the effect of switching parts off. This takes about eight more passes.
        loss: for `causes`, a function of the model's output and the batch that returns the loss, for gradient norms. If
            not given, the model's own loss, or the cross-entropy of its logits and the labels of the batch.
        pairs: batches with a second view of each sample, in the same order, for alignment: one for each batch. Extra
            batches are not read, and a note says so.
        device: where to run the model, which is moved back afterwards; its current device if not given.
        call: how to run the model on a batch, `call(model, batch)`, if the rule for `batches` does not fit.
        labels: names of the model and of the data, and the tokens of an example, for tables and reports.
        plan: how to sample: the random baseline, ranks, the input of the first block, and the seed.
        gather: share the batches with the other processes of `torch.distributed`, which all call this with the same
            batches: each of N processes measures every N-th batch. Metrics of all tokens or sequences are the same as
            in one process; samples differ. All processes get the diagnosis. Rank 0 measures the baseline.

    Returns:
        A Diagnosis: `print(d)`, `d.verdict`, `d.layers`, `d.save("d.json")`, `d.report("report.html")`.

    >>> import torch, uncollapse as uc
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    >>> d = uc.diagnose(model, [torch.randn(8, 16, 32)])
    >>> [layer.name for layer in d.layers]
    ['embed', 'block 0', 'block 1']
    """
    target = find_target(
        model,
        layers=layers,
        at=at,
        modules=modules,
        part=part,
        tokens=tokens,
        layout=layout,
        attention=attention,
        plan=plan,
    )
    if loss is not None and not causes:
        raise ValueError("loss is only for causes=True: gradients are not measured without it.")
    probe = make_probe(target, loss) if causes else None
    return measure(target, batches, pairs=pairs, device=device, call=call, labels=labels, gather=gather, probe=probe)


def make_probe(target: Target, loss: Loss | None = None) -> PartProbe:
    """Return what measures the parts of the blocks of a target."""
    config = target.config
    return PartProbe(target.model, target.stack, target.selection, prefix=config.prefix, seed=config.seed, loss=loss)


def measure(
    target: Target,
    batches: Iterable[Any],
    *,
    pairs: Iterable[Any] | None = None,
    device: torch.device | str | None = None,
    call: forward.Call = forward.run,
    labels: Labels | None = None,
    gather: bool = False,
    probe: PartProbe | None = None,
) -> Diagnosis:
    """Run the model of a target over batches and return its diagnosis; see `diagnose`."""
    started = time.perf_counter()
    check_batches(batches)
    rank, count = (distributed.rank(), distributed.world_size()) if gather else (0, 1)
    if count > 1:
        forward.check_unsharded(target.model)
    seed = target.plan.seed + rank  # samples that are merged need different seeds
    measured = [(one, one.capture(one.model, seed)) for one in (replace(target, others=()), *target.others)]
    captures = [capture for _, capture in measured]
    views = None if pairs is None else islice(group_texts(pairs), rank, None, count)
    rows = SentenceRows.of(target.model, seed)
    with forward.inspection_mode(target.model, device) as home, distributed.peer_errors():
        baselines = [_Baseline(one, one.plan.baseline if rank == 0 else 0) for one, _ in measured]
        counts, parts = Counts(), None
        for position, batch in enumerate(islice(group_texts(batches), rank, None, count)):
            batch = forward.move_to_device(batch, home)
            view = None if views is None else forward.move_to_device(next_view(views, position), home)
            number = position * count + rank
            seen = 0 if forward.is_empty(batch) else _measure(captures, call, batch, view, number, rows)
            if seen == 0:
                counts.skipped += 1
                continue
            if probe is not None and counts.batches == 0 and rank == 0:
                parts = probe.measure(call, batch, _graphs(batch))
            counts.batches += 1
            counts.unpaired += view is not None and seen == 1
            for baseline in baselines:
                baseline.update(call, batch, number)
        for baseline in baselines:
            baseline.finish()
        counts.spare = int(views is not None and next(views, None) is not None)
        if count > 1:
            counts = Counts(*map(int, distributed.sum_over_ranks([*astuple(counts)])))
            for capture in captures:
                capture.gather()
            rows.gather()

    def build_here() -> Diagnosis:
        seconds = time.perf_counter() - started
        each = list(zip(measured, baselines, strict=True))
        ran = [(*pair, baseline) for pair, baseline in each if pair[1].stats] or [(*measured[0], baselines[0])]
        idle = tuple(one.part for one, capture in measured if len(measured) > 1 and not capture.stats)
        causes = [parts if one[0] is measured[0][0] else None for one in ran]  # looked for in the first part
        found = [
            _build(*one, labels or Labels(), counts, seconds, idle, why) for one, why in zip(ran, causes, strict=True)
        ]
        return rows.join(replace(found[0], others=tuple(found[1:])))

    return distributed.on_rank_zero(build_here, "The diagnosis") if gather else build_here()


def check_batches(batches: Any) -> None:
    """Raise ValueError if batches are one batch rather than several, or cannot be batches."""
    if isinstance(batches, str | bytes) or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise ValueError(
            f"batches must be a list or a loader of batches, got {type(batches).__name__}. Tokenize texts first: "
            '[tokenizer(texts, padding=True, return_tensors="pt")]; or use the command `uncollapse diagnose`.'
        )
    one = isinstance(batches, Mapping | Tensor)
    if one or hasattr(type(batches), "edge_index"):  # PyG datasets answer for their graphs
        kind = type(batches).__name__
        raise ValueError(f"batches must be a list or a loader of batches, got one {kind}; pass [batch].")


class _Baseline:
    """A randomly initialized copy of the architecture, measured on the first batches.

    layers: what was measured. batches: on how many. missing: why there are no layers, "" if none were asked for.
    """

    def __init__(self, target: Target, batches: int) -> None:
        self.layers: tuple[Layer, ...] = ()
        self.batches = 0
        self.missing = ""
        self._wanted = batches
        self._capture: Capture | None = None
        if batches == 0:
            return
        if target.stack.reinitialize is None:
            self.missing = f"it is not known how to initialize {target.stack.architecture} again"
            return
        try:
            self._capture = target.capture(target.stack.reinitialize(target.model), target.plan.seed)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            self.missing = str(error)

    def update(self, call: forward.Call, batch: Any, number: int) -> None:
        """Measure a batch, if there have not been enough. A model that is not finite, as in half precision, is none."""
        if self._capture is None:
            return
        try:
            _measure([self._capture], call, batch, None, number)
        except NotFiniteError as error:
            self._capture, self.missing = None, f"with random weights it is not finite ({error})"
            return
        self.batches += 1
        if self.batches == self._wanted:
            self.finish()

    def finish(self) -> None:
        """Keep the layers, without heat maps, and free the model."""
        if self._capture is not None:
            self.layers = tuple(replace(layer, heatmap=()) for layer in self._capture.layers())
            self._capture = None


def _measure(
    captures: Sequence[Capture],
    call: forward.Call,
    batch: Any,
    view: Any,
    number: int,
    rows: SentenceRows | None = None,
) -> int:
    """Run the model under hooks on a batch, whose number is for errors, and on its second view if there is one.

    Return how many of its views held real tokens, rather than only padding; 0 if the batch itself did not. rows:
    receive the embeddings of sentences, without pairs of which one is only padding.
    """
    for capture in captures:
        capture.view = "first" if view is None else "first of two"
    outputs = [_run(captures, call, batch, f"batch {number + 1}")]
    if all(capture.only_padding for capture in captures):
        return 0
    if view is not None:
        for capture in captures:
            capture.view = "unpaired" if capture.only_padding else "second"
        outputs.append(_run(captures, call, view, f"the second view of batch {number + 1}"))
        if all(capture.only_padding for capture in captures):
            return 1
    if rows is not None:
        rows.update(*outputs)
    return len(outputs)


def _run(captures: Sequence[Capture], call: forward.Call, batch: Any, words: str) -> Any:
    """Return the output for a batch. If a layer is not finite, run it again to find where that begins."""
    model, stack = captures[0].model, captures[0].stack
    try:
        with ExitStack() as opened:
            for capture in captures:
                capture.graphs = _graphs(batch)
                opened.enter_context(capture)
            return call(model, batch)
    except MisfitError as error:  # the other parts may do
        parts = backbones.list_parts([capture.stack for capture in captures]) if len(captures) > 1 else ""
        raise ValueError(f"{error} {parts}".rstrip()) from error
    except NotFiniteError as error:
        with stack.under_hooks(model):
            begins = first_fault(model, lambda: call(model, batch))
        raise NotFiniteError(f"{error} in {words}.{'' if begins is None else f' {begins}'}") from error


def _graphs(batch: Any) -> Tensor | None:
    """Return the graph of each node if the batch has it: many models take only x and edge_index."""
    found = batch.get("batch") if isinstance(batch, Mapping) else getattr(batch, "batch", None)
    return found if isinstance(found, Tensor) else None


def _blocks_that_did_not_run(target: Target, capture: Capture) -> tuple[str, ...]:
    """Return their names; ValueError if the user named them: the verdict would be about the others alone."""
    measured = {name for name, _, _ in capture.stats}
    names = [target.stack.blocks[number].name for number in target.selection.blocks]
    missing = [name for name in names if name not in measured]
    if missing and target.modules:
        raise ValueError(
            f"{', '.join(missing)} did not run in any batch, so there is nothing to measure there. Leave it out of "
            f"modules; these ran: {', '.join(name for name in names if name in measured) or 'none'}."
        )
    return tuple(missing)


def _nothing_ran(target: Target, batches: int) -> str:
    """Return that no layer was measured, and what to do."""
    stack = target.stack
    if batches == 0:
        return f"No layer of {stack.architecture} was measured in 0 batches: give batches to run it."
    first = stack.blocks[0].path
    inside = [name for name, _ in target.model.get_submodule(first).named_children()][-1:]
    pattern = ".".join("*" if name.isdigit() else name for name in [*first.split("."), *inside])
    return (
        f"No block of {stack.architecture}, such as {first}, ran in {batches} batches. If the batches should run them, "
        "the model calls their `forward` itself, which hooks do not see: name modules inside them, such as "
        f"modules=[{pattern!r}]."
    )


def _build(
    target: Target,
    capture: Capture,
    baseline: _Baseline,
    labels: Labels,
    counts: Counts,
    seconds: float,
    idle: tuple[str, ...] = (),
    parts: Parts | None = None,
) -> Diagnosis:
    model = target.model
    if counts.skipped and not counts.batches:
        every = f"all batches ({counts.skipped}) are empty or only padding"
        raise ValueError(f"Nothing was measured: {every}. Check their masks.")
    layers = capture.layers()
    if not layers:
        raise ValueError(_nothing_ran(target, counts.batches))
    idle += _blocks_that_did_not_run(target, capture)
    check_enough(layers[-1].tokens)
    doubts: dict[str, Any] = {"no_baseline": baseline.missing, "unknown": labels.unknown, "skipped": counts.skipped}
    doubts |= {"unpaired": counts.unpaired, "spare_pairs": counts.spare > 0}
    subject = replace(_subject(target, capture), idle=idle, **doubts)
    measured = Measured(
        layers,
        baseline.layers,
        sequences=capture.sequences(),
        batches=counts.batches,
        parameters=sum(p.numel() for p in model.parameters()),
        settings=_settings(target, baseline),
        seconds=seconds,
        parts=parts,
    )
    name = labels.model or type(model).__name__
    return build(measured, subject, replace(labels, model=f"{name} {target.part}".rstrip()))


def _subject(target: Target, capture: Capture) -> Subject:
    """Return what is known of the model that was measured."""
    stack = target.stack
    return Subject(
        stack.family,
        stack.architecture,
        capture.context.causal,
        stack.places(),
        one_graph=stack.layout == "nodes" and capture.context.batch is None,
        modules=target.modules,
        blocks=len(stack.blocks),
        partial=target.partial,
        remark=stack.remark,
        part=target.part,
        passes=capture.passes,
    )


def _settings(target: Target, baseline: _Baseline) -> dict[str, Any]:
    """Return how a model was measured, as a diagnosis stores it."""
    stack = target.stack
    settings = settings_of(target.config, target.places)
    settings |= {"part": target.part} if target.part else {}
    settings["baseline_batches"] = baseline.batches if baseline.layers else 0
    if target.partial:
        settings["layers"] = [stack.blocks[number].name for number in target.selection.blocks]
    cures = [str(attachment) for attachment in attachments(target.model)]
    return settings | ({"cures": cures} if cures else {}) | dict(stack.facts)
