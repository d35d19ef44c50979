"""uncollapse diagnose."""

import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from uncollapse import distributed
from uncollapse.cli import console
from uncollapse.cli.console import select_device
from uncollapse.cli.failures import error_sentence
from uncollapse.cli.options import (
    DEVICES,
    DTYPES,
    GRAPHS,
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
from uncollapse.cli.progress import ProgressBar
from uncollapse.errors import UsageError

if TYPE_CHECKING:  # what measures is imported when something is measured
    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.io import Data, DataRequest, LoadedModel

DATA, MODEL, MEASURE = "Data (without any, what comes with the package)", "Model", "Measurement"  # panels of the help
NAMES = (
    "A HuggingFace folder, .gguf file or name; package:NAME/FOLDER inside an installed one; timm:NAME; "
    "module:function or file.py:function that builds it."
)


def diagnose(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=NAMES, show_default=False)],
    text: Annotated[str | None, option("FILE", "One text a line; - is the standard input.", DATA)] = None,
    images: Annotated[Path | None, option("DIR", "A folder of images, with all below it.", DATA)] = None,
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
    data_root: Annotated[Path | None, option("DIR", "Where the graphs with a name are.", DATA)] = None,
    batch_size: Annotated[int, option("N", "Samples a batch.", DATA, min=1)] = 32,
    max_length: Annotated[int | None, option("N", "Tokens of a text at most; 128 if not given.", DATA)] = None,
    max_batches: Annotated[int | None, option("N", "Stop after so many.", DATA, min=1)] = None,
    checkpoint: Annotated[Path | None, option("FILE", "Weights to load: safetensors or torch.", MODEL)] = None,
    random_weights: Annotated[bool, flag("--random-weights", "The architecture without its weights.", MODEL)] = False,
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
        list[str] | None, option("PATTERN", "Modules that are the layers, such as 'blocks.*'; repeatable.", MEASURE)
    ] = None,
    layout: Annotated[
        Layout | None, option("LAYOUT", f"Of their outputs: {', '.join(typing.get_args(Layout))}.", MEASURE)
    ] = None,
    part: Annotated[str | None, option("NAME", "The part to measure, such as vision_model.", MEASURE)] = None,
    places: Annotated[
        list[str],
        option(
            "PLACE",
            "Where in a block, such as attention.residual; repeatable.",
            MEASURE,
            autocompletion=complete_from(PLACES),
        ),
    ] = ["block"],  # noqa: B006
    attention: Annotated[bool, flag("--attention", "Measure attention maps too.", MEASURE)] = False,
    tokens: Annotated[
        Literal["patches", "all"], option("patches|all", "all: with CLS, distillation and register tokens.", MEASURE)
    ] = "patches",
    baseline: Annotated[
        bool, flag("--baseline/--no-baseline", "Measure the architecture with random weights beside it.", MEASURE)
    ] = True,
    name: Name = None,
    out: Out = None,
    as_json: AsJson = False,
    fail_on_collapse: FailOnCollapse = False,
) -> None:
    """Measure a model layer by layer: where and how its representations collapse."""
    from uncollapse import io

    distributed.join_group(device)
    wanted = io.DataRequest(text, images, graph, batches, data_root, batch_size, max_length, max_batches)
    settings: dict[str, Any] = {"layers": layers or None, "layout": layout, "part": part, "places": places}
    settings |= {"attention": attention, "tokens": tokens, "baseline": int(baseline), "device": select_device(device)}
    settings["gather"] = distributed.launch_size() > 1
    with ProgressBar() as waiting:
        waiting.stage("Loading the model")
        loaded = io.load_model(model, checkpoint=checkpoint, random_weights=random_weights, dtype=dtype)
        loaded = replace(loaded, name=name or (f"{loaded.name} {part}" if part else loaded.name))
        if distributed.is_launch_rank_zero() and (out is not None or not as_json):
            console.check_writable(console.output_folder(out, loaded.name))
        data = _data(loaded, wanted, settings)
        _tell(loaded, data, waiting.note)
        settings["progress"] = waiting.stage(f"Measuring {loaded.name}", data.total)
        diagnosis = _measured(loaded, data, wanted, settings)
    if not distributed.is_launch_rank_zero():
        raise typer.Exit(console.exit_code(diagnosis, fail_on_collapse))
    console.deliver(diagnosis, out=out, as_json=as_json, fail=fail_on_collapse)


def _data(loaded: "LoadedModel", wanted: "DataRequest", settings: dict[str, Any]) -> "Data":
    """The data that fits the blocks that will be measured."""
    from uncollapse import backbones, io

    try:
        stack = backbones.find(
            loaded.model, modules=settings["layers"], part=settings["part"], layout=settings["layout"]
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return io.load_data(loaded, stack, wanted)


def _tell(loaded: "LoadedModel", data: "Data", note: Callable[[str], None]) -> None:
    """What the user did not ask for, and should know."""
    from uncollapse.attachment.attach import attachments

    if data.built_in:
        note(f"No data was given, so {loaded.name} reads {data.words}.")
    for attachment in attachments(loaded.model):
        note(f"The model has a cure: {attachment}.")
    if loaded.filled:
        some = ", ".join(loaded.filled[:3]) + (", …" if len(loaded.filled) > 3 else "")
        note(f"{len(loaded.filled)} weights are missing in the files and are random: {some}.")


def _measured(loaded: "LoadedModel", data: "Data", wanted: "DataRequest", settings: dict[str, Any]) -> "Diagnosis":
    from uncollapse.diagnosis import run

    words: dict[str, Any] = {"name": loaded.name, "data": data.words, "example": data.example}
    try:
        diagnosis = run.diagnose(
            loaded.model, data.batches, max_batches=wanted.max_batches, call=data.call, **words, **settings
        )
    except UsageError:
        raise
    except ValueError as error:  # our own checks of what was asked for, and the model's of what it was given
        raise UsageError(str(error)) from error
    except Exception as error:
        raise RuntimeError(f"{loaded.name} failed on {data.words}: {error_sentence(error)}") from error
    if data.unreadable and distributed.is_launch_rank_zero():
        names = ", ".join(path.name for path in data.unreadable[:5]) + (", …" if len(data.unreadable) > 5 else "")
        console.print_note(f"Left out, since they cannot be read as images: {names} ({len(data.unreadable)} in all).")
    return diagnosis
