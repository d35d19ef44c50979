"""Model and batches -> Diagnosis."""

import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uncollapse import backbones, distributed
from uncollapse.attachment.attach import attachments
from uncollapse.backbones import forward
from uncollapse.backbones.nonfinite import first_fault
from uncollapse.backbones.sites import OUTPUT, Context, Layout, Stack, sets_with_mask
from uncollapse.diagnosis import verdict
from uncollapse.diagnosis.advice import suggest
from uncollapse.diagnosis.capture import Capture
from uncollapse.diagnosis.cautions import list_cautions
from uncollapse.diagnosis.layer_stats import LayerStats, StatsConfig, chosen_tokens
from uncollapse.diagnosis.result import Diagnosis, Layer, Verdict
from uncollapse.diagnosis.verdict import Subject
from uncollapse.errors import NotFiniteError

LIBRARIES = ("torch", "transformers", "timm", "torch_geometric")  # whose versions a diagnosis names, if they are in use


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Sequence[str] | None = None,
    part: str | None = None,
    layout: Layout | None = None,
    places: Sequence[str] = (OUTPUT,),
    attention: bool = False,
    embed: bool = True,
    tokens: Literal["patches", "all"] = "patches",
    pairs: Iterable[Any] | None = None,
    max_batches: int | None = None,
    baseline: int = 1,
    rank_samples: int = 2,
    device: torch.device | str | None = None,
    call: forward.Call = forward.run,
    name: str | None = None,
    data: str = "",
    example: Sequence[str] = (),
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    gather: bool = False,
) -> Diagnosis:
    """Measure every layer of a model while it runs over some batches, and say where and how it collapses.

    The model is not changed: hooks come out again, and its mode, device, dtype and the random states are left as found.
    There is one pass over the batches, and memory does not grow with their number.

    Args:
        model: a HuggingFace, timm, PyG or torch model, or any module with `layers`; it may be wrapped in your own.
        batches: what the model takes: tensors, mappings of arguments, tuples of which as many elements are passed on as
            the model's forward requires, or PyG data objects.
        layers: names or patterns of the modules that are the layers, for models that are not known ("blocks.*").
        part: the part to measure in a model with several stacks of blocks, such as "vision_model".
        layout: how outputs of named layers are read: "tokens" (b, n, d), "sequence_first" (n, b, d), "vectors" (b, d),
            "channels_first" (b, d, h, w), "nodes" (n, d); by their shape if not given.
        places: where in each block: "block" is the residual stream after it and always measured; "attention.residual"
            and "mlp.residual" are after the attention and after the MLP, where the model has these places.
        attention: measure attention maps too; the model then computes attention without fused kernels.
        embed: measure what enters the first block too; the features of a graph may be thousands, whose rank is slow.
        tokens: "patches" leaves out CLS, distillation and register tokens, "all" keeps them.
        pairs: batches with a second view of each sample, in the same order, for alignment.
        max_batches: stop after so many.
        baseline: on how many batches a randomly initialised copy of the architecture is measured beside it; 0 for none.
        rank_samples: sequences of each batch whose rank is taken; at least eight of the first.
        device: run there, and move the model back afterwards; where the model is if not given.
        call: how the model is run on a batch, `call(model, batch)`, where the rule above does not fit.
        name, data: what the model and the data are called in tables and reports.
        example: the tokens of the first sequence as text, for the heat map.
        seed: of all sampling.
        progress: called with the number of batches done, after each.
        gather: share the batches with the other processes of `torch.distributed`, which all call this with the same
            ones: of N processes each measures every N-th batch. What is measured of all tokens or sequences comes out
            as in one process, samples are others; all get the diagnosis. The random copy is the first one's.

    Returns:
        A Diagnosis: `print(d)`, `d.verdict`, `d.layers`, `d.save("d.json")`, `d.report("report.html")`.

    >>> import torch, uncollapse as uc
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    >>> d = uc.diagnose(model, [torch.randn(8, 16, 32)])
    >>> [layer.name for layer in d.layers]
    ['embed', 'block 0', 'block 1']
    """
    started = time.perf_counter()
    plan = _plan(rank_samples, attention, tokens, seed)
    places = tuple(dict.fromkeys((OUTPUT, *places)))  # the verdict reads the residual stream
    model = forward.unwrap_compiled(model)
    stack = backbones.find(model, modules=layers, part=part, layout=layout)
    stack = stack if embed else replace(stack, embed=None)
    if attention and not any(block.attention for block in stack.blocks):
        raise ValueError(f"{stack.architecture} has no attention maps that can be read; leave out attention.")
    me, count = (distributed.rank(), distributed.world_size()) if gather else (0, 1)
    if count > 1:
        forward.check_unsharded(model)
    capture = Capture(model, stack, places, replace(plan, seed=seed + me))  # samples that are merged need other seeds
    second = None if pairs is None else islice(iter(pairs), me, None, count)
    done = 0
    random: tuple[Layer, ...] = ()
    with forward.inspection_mode(model, device) as home, distributed.peer_errors():
        twin, why = _twin(model, stack, places, plan) if baseline and me == 0 else (None, "")
        for number, batch in enumerate(islice(_limited(batches, max_batches), me, None, count)):
            batch = forward.move_to_device(batch, home)
            view = None if second is None else forward.move_to_device(partner(second, number), home)
            _measure(capture, call, batch, view, number * count + me)
            if twin is not None:
                twin, why = _with_twin(twin, call, batch, number * count)
            done = number + 1
            if twin is not None and done >= baseline:
                random, twin = _bare(twin.layers()), None  # the random model is not needed any more
            if progress is not None:
                progress(done * count)
        compared = min(baseline, done)  # batches that the random copy saw
        if count > 1:
            done = int(distributed.sum_over_ranks([done])[0])
            capture.gather()
    if twin is not None:
        random = _bare(twin.layers())

    def judged() -> Diagnosis:
        measured = capture.layers()
        if not measured:
            raise ValueError(
                f"No layer of {stack.architecture} was measured in {done} batches: give batches that run it."
            )
        check_enough(measured[-1].tokens)
        subject = Subject(
            stack.family,
            stack.architecture,
            capture.context.causal,
            stack.places(),
            one_graph=stack.layout == "nodes" and capture.context.batch is None,
            no_baseline=why,
            modules=() if layers is None else ((layers,) if isinstance(layers, str) else tuple(layers)),
        )
        return Diagnosis(
            model=name or type(model).__name__,
            architecture=stack.architecture,
            family=stack.family,
            parameters=sum(p.numel() for p in model.parameters()),
            data=data,
            batches=done,
            sequences=capture.sequences(),
            tokens=measured[0].tokens,
            layers=measured,
            verdict=conclude(measured, random, subject, capture.sequences()),
            baseline=random,
            example=_chosen(example),
            settings={
                **_settings(plan, places),
                "baseline_batches": compared if random else 0,
                **_cures(model),
                **stack.facts,
            },
            versions=_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - started, 3),
        )

    return distributed.on_rank_zero(judged, "The diagnosis") if gather else judged()


def diagnose_activations(
    activations: Sequence[Tensor] | Mapping[str, Tensor],
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    name: str = "activations",
    data: str = "",
    example: Sequence[str] = (),
    rank_samples: int = 16,
    seed: int = 0,
) -> Diagnosis:
    """Measure activations that you have already: one tensor (b, n, d), or (n, d), a layer, in the order of the model.

    Args:
        activations: the tensors; with a mapping its keys name the layers, else they are "layer 0" and so on.
        mask: (b, n) bool, True = real.
        causal: whether the model is a causal decoder, whose first token is left out of robust measures.
        name, data, example, rank_samples, seed: as in `diagnose`.

    >>> import torch, uncollapse as uc
    >>> uc.diagnose_activations([torch.randn(8, 32, 16), torch.ones(8, 32, 16)]).verdict.kind
    'complete'
    """
    started = time.perf_counter()
    if not isinstance(activations, Mapping):
        activations = {f"layer {number}": x for number, x in enumerate(activations)}
    if not activations:
        raise ValueError("There are no activations: give one tensor (b, n, d) a layer.")
    plan, context = _full_plan(rank_samples, seed), Context(mask, causal=causal)
    layers, count = [], 0
    for title, x in activations.items():
        gauge = LayerStats(plan)
        sets, real = sets_with_mask(x, "tokens", context, prefix=True)
        gauge.update(sets, real, context)
        gauge.update_means(sets, real)
        layers.append(gauge.layer(title, OUTPUT, ""))
        count = gauge.sets
    check_enough(layers[-1].tokens)
    subject = Subject("activations", "activations", causal, (OUTPUT,))
    about = (subject, count, name, data, _chosen(example), time.perf_counter() - started)
    return of_layers(tuple(layers), *about, _settings(plan, (OUTPUT,)))


def of_layers(
    layers: tuple[Layer, ...],
    subject: Subject,
    sets: int,
    name: str,
    data: str,
    example: tuple[str, ...],
    seconds: float,
    settings: dict[str, Any],
) -> Diagnosis:
    """A diagnosis of layers that no model of ours computed."""
    return Diagnosis(
        model=name,
        architecture=subject.architecture,
        family=subject.family,
        parameters=0,
        data=data,
        batches=1,
        sequences=sets,
        tokens=layers[0].tokens,
        layers=layers,
        verdict=conclude(layers, (), subject, sets),
        example=example,
        settings=settings,
        versions=_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
    )


def conclude(layers: tuple[Layer, ...], baseline: tuple[Layer, ...], subject: Subject, sequences: int) -> Verdict:
    """Return the verdict on measured layers, with its cautions and advice."""
    found = verdict.evaluate(layers, baseline, subject, sequences)
    certainty, cautions = list_cautions(found)
    tips = suggest(found.kind, found.onset, found.subject) if found.onset else ()
    return Verdict(found.kind, found.onset, certainty, found.sentence(), found.evidence, cautions, tips)


def _plan(rank_samples: int, attention: bool, tokens: str, seed: int) -> StatsConfig:
    if tokens not in ("patches", "all"):
        raise ValueError(f'tokens must be "patches" or "all", got {tokens!r}.')
    if rank_samples < 1:
        raise ValueError(f"rank_samples must be at least 1, got {rank_samples}.")
    return StatsConfig(rank_samples, attention, tokens == "all", seed=seed)


def _full_plan(rank_samples: int, seed: int) -> StatsConfig:
    """For activations that are there already: no forward pass stands beside the cost of every token."""
    return replace(_plan(rank_samples, False, "all", seed), all_tokens=True)


def _measure(capture: Capture, call: forward.Call, batch: Any, partner: Any = None, done: int = 0) -> None:
    """Run the model on a batch, and on its second view, under hooks. done: batches before it."""
    capture.view = "first" if partner is None else "first of two"
    _run(capture, call, batch, f"batch {done + 1}")
    if partner is not None:
        capture.view = "second"
        _run(capture, call, partner, f"the second view of batch {done + 1}")


def _run(capture: Capture, call: forward.Call, batch: Any, words: str) -> None:
    """Run the model on a batch. Where a layer is not finite, another pass looks for the module at which that begins."""
    capture.graphs = _graphs(batch)
    try:
        with capture:
            call(capture.model, batch)
    except NotFiniteError as error:
        with capture.stack.under_hooks(capture.model):
            begins = first_fault(capture.model, lambda: call(capture.model, batch))
        raise NotFiniteError(f"{error} in {words}.{'' if begins is None else f' {begins}'}") from error


def _with_twin(twin: Capture, call: forward.Call, batch: Any, done: int) -> tuple[Capture | None, str]:
    """Measure the random model too; where it is not finite, as in half precision, there is none, and why."""
    try:
        _measure(twin, call, batch, done=done)
    except NotFiniteError as error:
        return None, f"with random weights it is not finite ({error})"
    return twin, ""


def _graphs(batch: Any) -> Tensor | None:
    """The graph of each node, if the batch says so: many models take x and edge_index only."""
    found = batch.get("batch") if isinstance(batch, Mapping) else getattr(batch, "batch", None)
    return found if isinstance(found, Tensor) else None


def _twin(model: nn.Module, stack: Stack, places: tuple[str, ...], plan: StatsConfig) -> tuple[Capture | None, str]:
    """A capture of a randomly initialised model of the same architecture, or the reason why there is none."""
    if stack.reinitialize is None:
        return None, f"it is not known how to initialise {stack.architecture} again"
    try:
        return Capture(stack.reinitialize(model), stack, places, plan), ""
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return None, str(error)


def check_enough(tokens: int) -> None:
    """Raise unless there are two tokens at least."""
    if tokens < 2:
        raise ValueError(f"Collapse is about how tokens differ; there must be at least two, got {tokens}.")


def _bare(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Layers of a random model: nobody looks at their heat maps."""
    return tuple(replace(layer, heatmap=()) for layer in layers)


def _limited(batches: Iterable[Any], most: int | None) -> Iterator[Any]:
    if most is not None and most < 1:
        raise ValueError(f"max_batches must be at least 1, got {most}.")
    if isinstance(batches, Mapping) or hasattr(type(batches), "edge_index"):  # PyG datasets answer for their graphs
        kind = type(batches).__name__
        raise ValueError(f"batches must be a list or a loader of batches, got one {kind}; pass [batch].")
    return islice(iter(batches), most)


def partner(pairs: Iterator[Any], number: int) -> Any:
    """The next second view, for the batch of this number."""
    try:
        return next(pairs)
    except StopIteration:
        raise ValueError(f"pairs ended after {number} batches; each batch needs its second view.") from None


def _chosen(example: Sequence[str]) -> tuple[str, ...]:
    """The tokens of the heat maps."""
    return tuple(example[position] for position in chosen_tokens(len(example)))


def _settings(plan: StatsConfig, places: Sequence[str]) -> dict[str, Any]:
    return {
        "places": list(places),
        "tokens": "all" if plan.prefix else "patches",
        "attention": plan.attention,
        "rank_samples": plan.rank_samples,
        "seed": plan.seed,
    }


def _cures(model: nn.Module) -> dict[str, list[str]]:
    """The cures that were in the model, if any."""
    found = [str(attachment) for attachment in attachments(model)]
    return {"cures": found} if found else {}


def _versions() -> dict[str, str]:
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("uncollapse", *LIBRARIES)}
    return {"python": platform.python_version(), **{name: str(value) for name, value in found.items() if value}}
