"""The command `uncollapse table`: results of a recipe next to the paper's numbers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uncollapse.cli import console
from uncollapse.cli.options import complete_recipe, flag, option
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.config import fields
from uncollapse.lab.tables import contrasts
from uncollapse.lab.tables import markdown as tables
from uncollapse.lab.tables.paper_table import Details, PaperTable, TableCell, build_cells, details_json

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe

STDOUT = Path("-")
INDENT = " " * len(f"{tables.REACHED} ")  # aligns numbers below numbers
PLACE = 3  # columns that say where a row of words belongs: group, row and column
ENDLESS = 10_000  # columns: wide enough to measure a table without wrapping
COLORS = {True: "green", False: "red", None: ""}  # by whether the paper's number was reached


def table(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="Recipe whose results to show; see `uncollapse list recipes`.",
            autocompletion=complete_recipe,
        ),
    ],
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="Which of its tables; the first if not given.")
    ] = None,
    results: Annotated[Path, option("DIR", "Folder of the results.")] = Path("results"),
    markdown: Annotated[
        Path | None, option("FILE", "Write the table as Markdown; - prints it, and nothing else.")
    ] = None,
    pairs: Annotated[
        list[str] | None, option("KEY=VALUE", "Only results with this setting; repeatable.", None, "--set")
    ] = None,
    html: Annotated[Path | None, option("FILE", "Write it as a self-contained page with plots.")] = None,
    as_json: Annotated[bool, flag("--json", "Print all cells as JSON and nothing else.")] = False,
) -> None:
    """Show the results of a recipe next to the paper's numbers."""
    if as_json and markdown == STDOUT:
        raise UsageError(
            "--json and --markdown - both print to the terminal; give --markdown a file, or leave out one."
        )
    for name, path in (("--markdown", markdown), ("--html", html)):
        if path is not None and path.is_dir():
            raise UsageError(f"{path} is a folder; {name} takes the name of a file.")
    chosen = _recipe(recipe)
    laid_out, every = _find_table(chosen, table), _records(chosen, results)
    laid_out, records = _filter(chosen, laid_out, every, pairs or [])
    details = () if chosen.details is None else chosen.details(records, every)
    written = _write(chosen, laid_out, records, details, markdown, html)
    made = build_cells(laid_out, records)
    if as_json:
        facts = tables.table_json(laid_out, made) | _statistics(chosen, records)
        facts |= {"details": details_json(details)} if details else {}
        typer.echo(json.dumps(facts, ensure_ascii=False, allow_nan=False))
    elif markdown == STDOUT:
        typer.echo(tables.to_markdown(laid_out, records, details=details), nl=False)
    else:
        _show(laid_out, made, details)
    if not any(cell.run for cell in made):
        console.print_note(
            f"No result of {recipe} in {results} belongs to this table. `uncollapse list recipes` lists the grids, and "
            f"`uncollapse sweep {recipe} --grid NAME` runs one."
        )
    if written:
        console.print_written(written, err=as_json or markdown == STDOUT)


def _statistics(recipe: "Recipe", records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the recipe's statistics over all results; nothing if it has none."""
    try:
        return {} if recipe.statistics is None else {"statistics": recipe.statistics(records)}
    except ImportError as error:
        raise UsageError(str(error)) from error


def _recipe(name: str) -> "Recipe":
    from uncollapse.lab.recipe import RECIPES

    try:
        return RECIPES[name]
    except KeyError as error:
        raise UsageError(str(error.args[0])) from error


def _find_table(recipe: "Recipe", name: str | None) -> PaperTable:
    if not recipe.tables:
        raise UsageError(f"The recipe {recipe.name} has no table.")
    if name is None:
        return next(iter(recipe.tables.values()))
    if name not in recipe.tables:
        hint = did_you_mean(name, recipe.tables)
        raise UsageError(f"{recipe.name} has no table named {name!r}.{hint} There are: {', '.join(recipe.tables)}.")
    return recipe.tables[name]


def _records(recipe: "Recipe", folder: Path) -> list[dict[str, Any]]:
    from uncollapse.lab.runs.results import Results

    records = Results(folder).all(recipe)
    if not records:
        grid = next((f"`uncollapse sweep {recipe.name} --grid {name}`" for name in recipe.grids), None)
        makes = " or ".join(filter(None, (f"`uncollapse train {recipe.name}`", grid)))
        raise UsageError(f"There are no results of {recipe.name} in {folder}. Make some with {makes}.")
    return records


def _filter(
    recipe: "Recipe", table: PaperTable, records: list[dict[str, Any]], pairs: list[str]
) -> tuple[PaperTable, list[dict[str, Any]]]:
    """Return the table and the records, restricted to results with these settings."""
    if not pairs:
        return table, records
    wanted = fields.parse_pairs(recipe.config, pairs)
    where = {name: value for name, value in table.where.items() if name not in wanted}
    kept = [record for record in records if all(record["config"][name] == value for name, value in wanted.items())]
    if not kept:
        raise UsageError(f"No result of {recipe.name} has {', '.join(pairs)}.")
    return replace(table, where=where, protocol={**table.protocol, **wanted}), kept


def _write(
    recipe: "Recipe",
    table: PaperTable,
    records: Sequence[Mapping[str, Any]],
    details: Sequence[Details],
    markdown: Path | None,
    html: Path | None,
) -> list[Path]:
    """Write the files before anything is printed: a pipe may close early."""
    from uncollapse.io.files import write

    files = []
    try:
        if markdown not in (None, STDOUT):
            files.append(write(markdown, tables.to_markdown(table, records, details=details)))
        if html is not None:
            from uncollapse.lab.tables.table_page import write_page

            plots = () if recipe.plots is None else recipe.plots(records)
            files.append(write_page(table, records, html, plots, details))
    except ImportError as error:
        raise UsageError(str(error)) from error
    return files


def _show(table: PaperTable, made: Sequence[TableCell], details: Sequence[Details]) -> None:
    terminal = console.stdout_console()
    console.print_paragraph(terminal, table.title, style="bold")
    for group, rows in tables.group_cells(made).items():
        for part in _fit_width(terminal, table, group, rows):
            terminal.print(part)
    console.print_paragraph(terminal, tables.legend(table, made))
    for note in tables.cell_notes(table, made):
        console.print_paragraph(terminal, note, bullet=" · ")
    if found := contrasts.compare_rows(table, made):
        head, lines = contrasts.contrast_rows(table, found)
        details = [Details(tables.DIFFERENCES, contrasts.contrast_note(found), head, lines, words=3), *details]
    for each in details:
        _show_details(terminal, each)
    console.print_paragraph(terminal, tables.coverage(table, made), style="bold")


def _show_details(terminal: Console, details: Details) -> None:
    """Print a further table; where it is too wide for whole words, one per place, or else one paragraph per row.

    Such a paragraph begins with the columns of words, or with the first three if all columns are words.
    """
    if not details.rows:
        console.print_paragraph(terminal, f"{details.title}: {details.note}")
        return
    parts = [details] if _fits(details, terminal.width, whole=True) else _by_place(details)
    if all(_fits(part, terminal.width) for part in parts):
        if parts != [details]:
            console.print_paragraph(terminal, details.title, style="bold")
        for part in parts:
            terminal.print(_details_table(part, terminal.width))
    else:
        console.print_paragraph(terminal, details.title, style="bold")
        for row in details.rows:
            first = details.words if details.words < len(details.head) else PLACE
            name, facts = ", ".join(row[:first]), zip(details.head, row, strict=True)
            words = "; ".join(f"{head} {text}" for head, text in list(facts)[first:])
            console.print_paragraph(terminal, f"{name}: {words}" if words else name, bullet=" · ")
    console.print_paragraph(terminal, details.note)


def _by_place(details: Details) -> list[Details]:
    """Return one table per place, which its title names instead of the first columns; itself if it has no places."""
    if details.words != PLACE:
        return [details]
    places: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in details.rows:
        places.setdefault(row[: PLACE - 1], []).append(row[PLACE - 1 :])
    named = {place: ", ".join(map(" ".join, zip(details.head, place, strict=False))) for place in places}
    return [Details(named[place], "", details.head[PLACE - 1 :], rows) for place, rows in places.items()]


def _fits(details: Details, width: int, whole: bool = False) -> bool:
    from uncollapse.io.display import table_width

    return table_width(_least_widths(details, whole)) <= width


def _least_widths(details: Details, whole: bool) -> list[int]:
    """Return the width of the longest word of each column; whole: "a … b" and "a → b" in the rows count as one."""
    columns = zip(details.head, *details.rows, strict=True)
    return [max(_longest_word(text, whole and text != head) for text in (head, *of)) for head, *of in columns]


def _longest_word(text: str, whole: bool) -> int:
    for sign in "…→" if whole else "":
        text = text.replace(f" {sign} ", f"_{sign}_")
    return max(map(len, text.split()), default=0)


def _details_table(details: Details, width: int) -> Table:
    from uncollapse.io.display import exact_widths

    table = Table(title=Text(details.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    least = _least_widths(details, whole=_fits(details, width, whole=True))
    widths = exact_widths(list(details.head), [list(row) for row in details.rows], least, width)
    for number, (name, exact) in enumerate(zip(details.head, widths, strict=True)):
        table.add_column(Text(name), justify="left" if number < details.words else "right", width=exact)
    for row in details.rows:
        table.add_row(*map(Text, row))
    return table


def _fit_width(
    terminal: Console, table: PaperTable, group: Any, rows: Mapping[Any, Sequence[TableCell]]
) -> list[Table]:
    """Return a table, or several with some of its columns each, so that no number is wrapped."""
    count = len(next(iter(rows.values())))
    unbound = terminal.options.update(max_width=ENDLESS)
    for columns in range(count, 0, -1):
        starts = range(0, count, columns)
        parts = [_table(table, group, {row: along[i : i + columns] for row, along in rows.items()}) for i in starts]
        if all(terminal.measure(part, options=unbound).maximum <= terminal.width for part in parts):
            break
    return parts


def _table(table: PaperTable, group: Any, rows: Mapping[Any, Sequence[TableCell]]) -> Table:
    title = Text(f"{table.groups} {group}", style="bold")
    shown = Table(tables.corner_label(table), title=title, title_justify="left", box=box.SIMPLE_HEAD, leading=1)
    for cell in next(iter(rows.values())):
        shown.add_column(Text(f"{INDENT}{cell.column}"))
    for row, along in rows.items():
        shown.add_row(Text(str(row)), *(_cell(table, cell) for cell in along))
    return shown


def _cell(table: PaperTable, cell: TableCell) -> Text:
    """Return our number, below it the paper's, the interval of the difference, and what was selected."""
    came, sign = tables.format_marked(table, cell), tables.sign_of(cell)
    color = {tables.NEAR: "yellow", tables.TIED: ""}.get(sign, COLORS[cell.reached])
    text = Text(came if sign else f"{INDENT}{came}", style=color)
    for line in (
        tables.format_published(table, cell),
        tables.format_difference(table, cell),
        tables.format_choice(cell),
    ):
        if line:
            text.append(f"\n{INDENT}{line}", style="dim not bold default")
    return text
