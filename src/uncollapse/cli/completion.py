"""What the shell completes, and how it is told to: names are found without importing torch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer
from typer import completion

from uncollapse.errors import did_you_mean

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
FLAGS: dict[str, Callable[[Any, Any, str], Any]] = {
    "--install-completion": completion.install_callback,
    "--show-completion": completion.show_callback,
}


def among(names: Iterable[str] | Mapping[str, str]) -> Callable[[str], list[tuple[str, str]]]:
    """For the `autocompletion` of an option: those of the names that begin as what was typed, with what they are."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        words = names if isinstance(names, Mapping) else dict.fromkeys(names, "")
        return [(name, words[name]) for name in words if name.startswith(incomplete)]

    return complete


def recipes(incomplete: str) -> list[str]:
    """The recipes that begin so."""
    from uncollapse.lab.recipe import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def told(ctx: Any, args: list[str]) -> None:
    """Install or show the completion for the shell that is named behind the flag, or for the one that runs.

    typer's own flags take no name, and know no way out where the shell cannot be found, as in a container.
    """
    if not args or args[0] not in FLAGS or ctx.resilient_parsing:
        return
    shell = args[1] if len(args) > 1 else _running()
    if shell not in SHELLS:
        named = f"{shell!r} is no shell that is known here" if shell else "Which shell this is cannot be found out"
        hint = did_you_mean(shell, SHELLS) if shell else ""
        raise typer.BadParameter(f"{named}; name one of {', '.join(SHELLS)}: uncollapse {args[0]} bash.{hint}")
    FLAGS[args[0]](ctx, None, shell)


def _running() -> str | None:
    """The shell that this was started from."""
    try:
        import shellingham

        return str(shellingham.detect_shell()[0])
    except (ImportError, RuntimeError, OSError):  # ShellDetectionFailure is an OSError
        return None
