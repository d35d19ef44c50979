"""Options that commands share, the names that they accept, and shell completion; none of it needs torch."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import completion
from typer.core import TyperCommand

from uncollapse.errors import did_you_mean


class Command(TyperCommand):
    """A command whose help has no type after flags that typer adds, and no column for the second form of switches."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with both forms of a switch, such as --x and --no-x, below each other."""
        params: list[Any] = list(self.params)
        switches = [(param, vars(param).copy()) for param in params if param.secondary_opts]
        try:
            for switch, own in switches:
                switch.opts, switch.secondary_opts = ["\n".join((*own["opts"], *own["secondary_opts"]))], []
                switch.show_default = "on" if own["default"] else "off"
            super().format_help(ctx, formatter)
        finally:
            for switch, own in switches:
                vars(switch).update(own)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters."""
        return without_flag_types(super().get_params(ctx))


def without_flag_types(params: list[Any]) -> list[Any]:
    """Leave out "<bool>" after flags, such as --help."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def option(metavar: str | None, words: str, panel: str | None = None, *names: str, **more: Any) -> Any:
    """Declare an option that takes a value."""
    return typer.Option(*names, metavar=metavar, help=words, rich_help_panel=panel, **more)


def flag(name: str, words: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, metavar="", help=words, rich_help_panel=panel, **more)


OUTPUT = "Output"
Name = Annotated[str | None, option("NAME", "Name in tables and reports.", OUTPUT)]
Out = Annotated[
    Path | None, option("DIR", "Folder for diagnosis.json and report.html; by default named after the model.", OUTPUT)
]
AsJson = Annotated[
    bool, flag("--json", "Print the diagnosis as JSON and nothing else; writes files only with --out.", OUTPUT)
]
FailOnCollapse = Annotated[bool, flag("--fail-on-collapse", "Exit with code 3 if there is a collapse.", OUTPUT)]

Layout = Literal["auto", "tokens", "sequence_first", "nodes", "vectors", "channels_first", "channels_last"]
DEVICES = ("auto", "cpu", "cuda", "mps")
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
    """Return the `autocompletion` of an option: names that begin with the typed text, with their descriptions."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        words = names if isinstance(names, Mapping) else dict.fromkeys(names, "")
        return [(name, words[name]) for name in words if name.startswith(incomplete)]

    return complete


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes whose names begin with the typed text."""
    from uncollapse.lab.recipe import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def handle_completion_flags(ctx: Any, args: list[str]) -> None:
    """Install or show the completion for the shell that is named after the flag, or for the running one.

    typer's own flags take no name, and fail where the shell cannot be detected, as in a container.
    """
    if not args or args[0] not in FLAGS or ctx.resilient_parsing:
        return
    shell = args[1] if len(args) > 1 else _running_shell()
    if shell not in SHELLS:
        named = f"{shell!r} is not a known shell" if shell else "The running shell cannot be detected"
        hint = did_you_mean(shell, SHELLS) if shell else ""
        raise typer.BadParameter(f"{named}; name one of {', '.join(SHELLS)}: uncollapse {args[0]} bash.{hint}")
    FLAGS[args[0]](ctx, None, shell)


def _running_shell() -> str | None:
    """Return the shell that started this process."""
    try:
        import shellingham

        return str(shellingham.detect_shell()[0])
    except (ImportError, RuntimeError, OSError):  # ShellDetectionFailure is an OSError
        return None
