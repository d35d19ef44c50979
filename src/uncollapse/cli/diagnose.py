"""The command `uncollapse diagnose`: measure a model layer by layer."""

import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from uncollapse import distributed
from uncollapse.cli import console
from uncollapse.cli.console import error_sentence, select_device
from uncollapse.cli.options import (
    DEVICES,
    PLACES,
    AsJson,
    FailOnCollapse,
    Layout,
    Name,
    Out,
    complete_from,
    flag,
    option,
)
from uncollapse.cli.progress import ProgressBar, count_steps
from uncollapse.errors import UsageError
from uncollapse.io import DTYPES, GRAPHS

if TYPE_CHECKING:  # torch is imported only when something is measured
    import torch

    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.diagnosis.target import Target
    from uncollapse.io.batches import Data, DataRequest
    from uncollapse.io.models import LoadedModel

LENGTH = 128  # tokens of a text, as in io.batches, which needs torch
DATA, MODEL, MEASURE = "Data (built-in data if none is given)", "Model", "Measurement"  # panels of the help
NAMES = (
    "A HuggingFace folder, .gguf file or name; package:NAME/FOLDER in an installed package; timm:NAME; "
    "module:function or file.py:function that builds it."
)


def diagnose(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=NAMES, show_default=False)],
    text: Annotated[str | None, option("FILE", "File with one text per line; - reads standard input.", DATA)] = None,
    images: Annotated[Path | None, option("DIR", "A folder of images, with its subfolders.", DATA)] = None,
    graph: Annotated[
        str | None,
        option(
            "NAME|FILE",
            f"{', '.join(GRAPHS)}; .npz (node_features, edges); .pt (x, edge_index).",
            DATA,
            autocompletion=complete_from(GRAPHS),
        ),
    ] = None,
    batches: Annotated[str | None, option("MODULE:FUNCTION", "A function that returns batches.", DATA)] = None,
    data_root: Annotated[Path | None, option("DIR", "Folder of the named graphs.", DATA)] = None,
    batch_size: Annotated[int, option("N", "Samples per batch.", DATA, min=1)] = 32,
    max_length: Annotated[
        int | None,
        option("N", "Maximum number of tokens per text; if not given, 128, or that of a sentence encoder.", DATA),
    ] = None,
    max_batches: Annotated[int | None, option("N", "Maximum number of batches.", DATA, min=1)] = None,
    checkpoint: Annotated[Path | None, option("FILE", "Weights to load: safetensors or torch.", MODEL)] = None,
    random_weights: Annotated[
        bool, flag("--random-weights", "Use the architecture with random weights.", MODEL)
    ] = False,
    device: Annotated[
        str, option("DEVICE", "cpu, cuda, mps or auto.", MODEL, autocompletion=complete_from(DEVICES))
    ] = "auto",
    dtype: Annotated[
        str | None,
        option(
            "DTYPE",
            f"{', '.join(DTYPES)} (the stored one); without it HuggingFace models are float32.",
            MODEL,
            autocompletion=complete_from(DTYPES),
        ),
    ] = None,
    layers: Annotated[
        list[str] | None,
        option(
            "LAYERS", "Which blocks: 3, -1, first, 'last 4', 4:8, embed, final; repeatable; all if not given.", MEASURE
        ),
    ] = None,
    at: Annotated[
        list[str],
        option(
            "PLACE",
            "Where in a block, such as attention.residual; repeatable. block is always measured.",
            MEASURE,
            autocompletion=complete_from(PLACES),
        ),
    ] = ["block"],  # noqa: B006
    modules: Annotated[
        list[str] | None,
        option("PATTERN", "Modules that are the blocks of an unknown model, such as 'blocks.*'; repeatable.", MEASURE),
    ] = None,
    part: Annotated[str | None, option("NAME", "The part to measure, such as vision_model.", MEASURE)] = None,
    tokens: Annotated[
        Literal["patches", "all"],
        option("patches|all", "all includes CLS, distillation and register tokens.", MEASURE),
    ] = "patches",
    layout: Annotated[
        Layout | None, option("LAYOUT", f"Layout of --modules: {', '.join(typing.get_args(Layout))}.", MEASURE)
    ] = None,
    attention: Annotated[bool, flag("--attention", "Measure attention maps too.", MEASURE)] = False,
    why: Annotated[bool, flag("--why", "Look for the cause: measure parts, switch them off.", MEASURE)] = False,
    preset: Annotated[
        Literal["decoder"] | None,
        option("decoder", "For language models: long texts, few at a time, the stored dtype, no baseline.", MODEL),
    ] = None,
    baseline: Annotated[
        bool,
        flag("--baseline/--no-baseline", "Also measure the architecture with random weights, for comparison.", MEASURE),
    ] = True,
    name: Name = None,
    out: Out = None,
    as_json: AsJson = False,
    fail_on_collapse: FailOnCollapse = False,
) -> None:
    """Measure a model layer by layer: where and how its representations collapse."""
    from uncollapse.attachment.save import load_cure
    from uncollapse.io.batches import DataRequest
    from uncollapse.io.models import load_model

    distributed.join_group(device)
    length = LENGTH
    if preset == "decoder":  # settings that are given win
        given = {name for name in ("batch_size", "dtype", "baseline") if _is_given(ctx, name)}
        batch_size, length = batch_size if "batch_size" in given else 4, 512
        dtype, baseline = dtype if "dtype" in given else "auto", baseline if "baseline" in given else False
    wanted = DataRequest(text, images, graph, batches, data_root, batch_size, max_length, max_batches, length)
    home = select_device(device)
    with ProgressBar() as waiting:
        waiting.stage("Loading the model")
        loaded = load_model(
            model, checkpoint=checkpoint, random_weights=random_weights, dtype=dtype, load_cure=load_cure
        )
        loaded = replace(loaded, name=name or (f"{loaded.name} {part}" if part else loaded.name))
        place = console.output_folder(out, loaded.name, as_json) if distributed.is_launch_rank_zero() else None
        where = {"layers": _read_layers(layers), "at": at, "modules": modules or None, "part": part, "tokens": tokens}
        target = _find_target(loaded, **where, layout=layout, attention=attention, baseline=int(baseline))
        diagnosis = _measure_parts(loaded, target, wanted, home, why, waiting)
    if not distributed.is_launch_rank_zero():
        raise typer.Exit(console.exit_code(diagnosis, fail_on_collapse))
    console.deliver(diagnosis, place=place, as_json=as_json, fail=fail_on_collapse)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read_layers(layers: list[str] | None) -> list[int | str] | None:
    """Return what `diagnose` takes as `layers`: numbers as numbers."""
    return [int(entry) if re.fullmatch(r"-?\d+", entry) else entry for entry in layers] if layers else None


def _find_target(loaded: "LoadedModel", *, baseline: int, **where: Any) -> "Target":
    """Return what will be measured. UsageError if the arguments do not fit the model."""
    from uncollapse.diagnosis.target import Plan, find_target

    try:
        return find_target(loaded.model, **where, plan=Plan(baseline=baseline))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _measure_parts(
    loaded: "LoadedModel", target: "Target", wanted: "DataRequest", device: "torch.device", why: bool, bar: ProgressBar
) -> "Diagnosis":
    """Measure all parts of a model: in the same passes, or one after the other where each has inputs of its own.

    A part that the data does not fit is left out with a note, unless no part is left.
    """
    from uncollapse.io.batches import load_data, runs_alone

    alone = bool(target.others) and not wanted.batches and runs_alone(loaded.model, target.stack)
    found: list[Diagnosis] = []
    problems: list[Exception] = []
    for one in (replace(target, others=()), *target.others) if alone else (target,):
        try:
            data = load_data(loaded, one.stack, wanted)
            _note_surprises(loaded, data, bar.note)
            done = bar.stage(f"Measuring {loaded.name} {one.part if alone else ''}".rstrip(), data.total)
            found.append(_measure(loaded, one, replace(data, batches=_limit(data, wanted, done)), device, why))
            if data.unreadable:  # known after the last batch
                bar.note(_unreadable_note(data))
        except (UsageError, RuntimeError) as error:
            if not alone:
                raise
            problems.append(error)
            bar.note(f"{one.part} is left out: {error}")
    if not found:
        raise problems[0]
    return replace(found[0], others=(*found[0].others, *found[1:]))


def _unreadable_note(data: "Data") -> str:
    """Return which files were no images."""
    names = ", ".join(path.name for path in data.unreadable[:5]) + (", …" if len(data.unreadable) > 5 else "")
    return f"Skipped because they are not readable images: {names} ({len(data.unreadable)} in total)."


def _note_surprises(loaded: "LoadedModel", data: "Data", note: Callable[[str], None]) -> None:
    """Print notes about what the user did not ask for but should know."""
    from uncollapse.attachment.attach import attachments

    if data.built_in:
        note(f"No data was given, so {loaded.name} reads {data.words}.")
    for attachment in attachments(loaded.model):
        note(f"The model has a cure: {attachment}.")
    if loaded.note:
        note(loaded.note)
    if loaded.filled:
        some = ", ".join(loaded.filled[:3]) + (", …" if len(loaded.filled) > 3 else "")
        note(f"{len(loaded.filled)} weights are missing in the files and are random: {some}.")


def _limit(data: "Data", wanted: "DataRequest", done: Callable[[int], None]) -> Iterator[Any]:
    """Return the batches, at most as many as were asked for, and report progress while they are read."""
    from uncollapse.diagnosis.run import check_batches

    try:
        check_batches(data.batches)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return count_steps(islice(iter(data.batches), wanted.max_batches), done)


def _measure(loaded: "LoadedModel", target: "Target", data: "Data", device: "torch.device", why: bool) -> "Diagnosis":
    from uncollapse.diagnosis.build import Labels
    from uncollapse.diagnosis.run import make_probe, measure

    labels = Labels(loaded.name, data.words, data.example, data.unknown)
    options: dict[str, Any] = {"gather": distributed.launch_size() > 1, "probe": make_probe(target) if why else None}
    try:
        return measure(target, data.batches, device=device, call=data.call, labels=labels, **options)
    except UsageError:
        raise
    except ValueError as error:  # our own checks of the arguments, and the model's checks of its input
        raise UsageError(str(error)) from error
    except Exception as error:
        raise RuntimeError(f"{loaded.name} failed on {data.words}: {error_sentence(error)}") from error
