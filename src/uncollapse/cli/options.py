"""Options as the commands declare them."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import completion

from uncollapse.errors import did_you_mean


def option(metavar: str | None, words: str, panel: str | None = None, *names: str, **more: Any) -> Any:
    """An option that takes a value."""
    return typer.Option(*names, metavar=metavar, help=words, rich_help_panel=panel, **more)


def flag(name: str, words: str, panel: str | None = None, **more: Any) -> Any:
    """An option that is there or not; the help shows no value for it."""
    return typer.Option(name, metavar="", help=words, rich_help_panel=panel, **more)


OUTPUT = "Output"
Name = Annotated[str | None, option("NAME", "What to call it in tables and reports.", OUTPUT)]
Out = Annotated[
    Path | None, option("DIR", "Folder for diagnosis.json and report.html; one named after the model here.", OUTPUT)
]
AsJson = Annotated[
    bool, flag("--json", "Print the diagnosis as JSON and nothing else; no files without --out.", OUTPUT)
]
FailOnCollapse = Annotated[bool, flag("--fail-on-collapse", "Exit with 3 if there is a collapse.", OUTPUT)]


Layout = Literal["auto", "tokens", "sequence_first", "nodes", "vectors", "channels_first"]
DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")
DEVICES = ("auto", "cpu", "cuda", "mps")
GRAPHS = {"karate": "Zachary's karate club", "cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
PLACES = {
    "block": "the residual stream after a block",
    "attention.input": "what enters the block",
    "attention.context": "the heads, before the output projection of attention",
    "attention.output": "what attention adds to the residual",
    "attention.residual": "the residual stream after attention",
    "attention.norm": "what leaves the norm of attention",
    "attention.norm.input": "what the norm in front of attention sees",
    "mlp.output": "what the MLP adds to the residual",
    "mlp.residual": "the residual stream after the MLP",
    "mlp.norm": "what leaves the norm of the MLP",
    "mlp.norm.input": "what the norm in front of the MLP sees",
    "cross.output": "what cross-attention adds to the residual",
    "cross.residual": "the residual stream after cross-attention",
    "cross.norm": "what leaves the norm of cross-attention",
    "cross.norm.input": "what the norm in front of cross-attention sees",
    "conv.output": "after a graph convolution, before norm and activation",
}


SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
FLAGS: dict[str, Callable[[Any, Any, str], Any]] = {
    "--install-completion": completion.install_callback,
    "--show-completion": completion.show_callback,
}


def complete_from(names: Iterable[str] | Mapping[str, str]) -> Callable[[str], list[tuple[str, str]]]:
    """For the `autocompletion` of an option: those of the names that begin as what was typed, with what they are."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        words = names if isinstance(names, Mapping) else dict.fromkeys(names, "")
        return [(name, words[name]) for name in words if name.startswith(incomplete)]

    return complete


def complete_recipe(incomplete: str) -> list[str]:
    """The recipes that begin so."""
    from uncollapse.lab.recipe import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def handle_completion_flags(ctx: Any, args: list[str]) -> None:
    """Install or show the completion for the shell that is named behind the flag, or for the one that runs.

    typer's own flags take no name, and know no way out where the shell cannot be found, as in a container.
    """
    if not args or args[0] not in FLAGS or ctx.resilient_parsing:
        return
    shell = args[1] if len(args) > 1 else _running_shell()
    if shell not in SHELLS:
        named = f"{shell!r} is no shell that is known here" if shell else "Which shell this is cannot be found out"
        hint = did_you_mean(shell, SHELLS) if shell else ""
        raise typer.BadParameter(f"{named}; name one of {', '.join(SHELLS)}: uncollapse {args[0]} bash.{hint}")
    FLAGS[args[0]](ctx, None, shell)


def _running_shell() -> str | None:
    """The shell that this was started from."""
    try:
        import shellingham

        return str(shellingham.detect_shell()[0])
    except (ImportError, RuntimeError, OSError):  # ShellDetectionFailure is an OSError
        return None
