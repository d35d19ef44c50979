"""Command-line flags of a recipe, one per field of its configuration."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from rich.markup import escape

from uncollapse.cli.options import Command, flag, option
from uncollapse.errors import UsageError
from uncollapse.lab.config import fields
from uncollapse.lab.config.field_types import as_text, union_members
from uncollapse.lab.config.fields import ConfigField, read_config_file

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe

PANEL = "Experiment"
SHORT = 26  # characters of choices that fit into the column of values
VALUES = {int: "N", float: "X", str: "TEXT", bool: "true|false", NoneType: "none"}


def config_flags(config: type) -> list[inspect.Parameter]:
    """Return the parameters of a command as typer reads them from a function."""
    return [
        inspect.Parameter(
            setting.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=setting.default if setting.annotation is bool else as_text(setting.default),
            annotation=_annotation(setting),
        )
        for setting in fields.config_fields(config).values()
    ]


def preset_flag(presets: Iterable[str], panel: str) -> inspect.Parameter:
    """Return the flag that names one of a recipe's presets."""
    words = f"Named settings, such as a paper's; files and flags override them: {', '.join(presets)}."
    annotation = Annotated[str | None, option("NAME", escape(words), panel)]
    return inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def quick_flag(panel: str) -> inspect.Parameter:
    """Return the flag for a small run on installed data."""
    words = "A small run on installed data, in less than two minutes; files and flags override it."
    annotation = Annotated[bool, flag("--quick", words, panel)]
    return inspect.Parameter("quick", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def named_settings(recipe: "Recipe", preset: str | None, is_quick: bool) -> Mapping[str, Any]:
    """Return the settings of a preset or of the quick run."""
    if is_quick and preset is not None:
        raise UsageError(f"--quick and --preset {preset} exclude each other; leave out one.")
    return (recipe.quick or {}) if is_quick else {} if preset is None else recipe.preset(preset)


def build_command(
    recipe: "Recipe", order: type, run: Callable[..., None], panel: str, without: Collection[str] = ()
) -> Any:
    """Build a command whose flags are the fields of the recipe's configuration and those of `order`.

    run: a new function each time; it gets all flags by name, and the context as `ctx`. panel: help panel of the flags
    that name settings. without: fields of `order` that are not flags here.
    """
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inspect.signature(order).parameters.values()]
    own = [parameter for parameter in own if parameter.name not in without]
    named = [preset_flag(recipe.presets, panel)] if recipe.presets else []
    small = [quick_flag(panel)] if recipe.quick is not None else []
    function: Any = run
    function.__signature__ = inspect.Signature([context, *config_flags(recipe.config), *small, *named, *own])
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    words = f"{recipe.title}.\n\n{recipe.paper}"
    alone.command(recipe.name, cls=Command, help=words, rich_help_panel="Recipes")(function)
    return typer.main.get_command(alone)


def read_config(
    ctx: typer.Context, config: type, preset: Mapping[str, Any], files: list[Path], pairs: list[str]
) -> Any:
    """Return the configuration: defaults, preset, files in their order, key=value, flags; the last one wins."""
    return fields.build(config, {**preset, **given_settings(ctx, config, files, pairs)})


def given_settings(ctx: typer.Context, config: type, files: list[Path], pairs: list[str]) -> dict[str, Any]:
    """Return the given settings: from files in their order, key=value and flags; the last one wins."""
    values: dict[str, Any] = {}
    for path in files:
        try:
            read = read_config_file(path)
            _check_flags(ctx, config, read)
            values |= fields.parse_values(config, read)
        except UsageError as error:
            message = str(error) if str(path) in str(error) else f"{path}: {error}"
            raise UsageError(message) from error
    values |= fields.parse_pairs(config, pairs)
    return values | {name: ctx.params[name] for name in fields.config_fields(config) if _is_given(ctx, name)}


def _check_flags(ctx: typer.Context, config: type, names: Iterable[str]) -> None:
    """Raise if a file sets an option of the command, such as seeds."""
    flags = {flag.strip("-").replace("-", "_"): flag for option in ctx.command.params for flag in option.opts}
    for name in names:
        plain = name.replace("-", "_")
        if plain in flags and plain not in fields.config_fields(config):
            raise UsageError(f"{name} is a flag of the command, not a setting; leave it out, and use {flags[plain]}.")


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _annotation(setting: ConfigField) -> Any:
    words, values, panel = escape(setting.help), _values(setting), setting.group or PANEL
    if setting.annotation is bool:
        both = f"{setting.flag}/--no-{setting.flag[2:]}"
        return Annotated[bool, typer.Option(both, metavar="", help=words, rich_help_panel=panel)]
    if len(values) > SHORT:
        values, words = "NAME", f"{words} Allowed: {', '.join(values.split('|'))}.".lstrip()
    return Annotated[str, option(values, words, panel, setting.flag)]


def _values(setting: ConfigField) -> str:
    """Return what the help shows after the flag."""
    return "|".join(_value(kind, setting.choices) for kind in union_members(setting.annotation))


def _value(kind: Any, choices: tuple[Any, ...] | None) -> str:
    if get_origin(kind) is tuple:
        return f"{_value(get_args(kind)[0], None)},…"
    choices = get_args(kind) if get_origin(kind) is Literal else choices
    return "|".join(map(as_text, choices)) if choices and kind is not NoneType else VALUES[kind]
