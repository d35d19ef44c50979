"""Configurations in files and settings of every recipe: each gives a value or is refused in a sentence."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import (
    LARGEST,
    build,
    command_line,
    config_fields,
    identity,
    parse_pairs,
    parse_values,
    read_config_file,
)
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results

from .damage import TEXTS, WILD, answer, damaged, few

YAML = b"layers: 16\nnorm: contra_norm\nscale: 0.5\n# a note\nseed: 3\nlist: [1, 2]\nmore: {a: b}\n"
PIECES = [
    "&a",
    "*a",
    "!!",
    "!!python/object:os.system",
    "? ",
    ": ",
    "- ",
    "[",
    "{",
    "|",
    ">",
    "%",
    "@",
    "<<: ",
    "2001-99-99",
]
PIECES += [
    "0b_",
    "1:99",
    "0x" + 5000 * "f",
    5000 * "9",
    "!!float x",
    "!!timestamp x",
    "\t",
    "---",
    "...",
    "\x00",
    "é",
    "~",
    ".nan",
]
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(9 * ['*' + before])}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPE = RECIPES["gcn-depth"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


def used(folder: Path, name: str, content: bytes) -> Any:
    """What becomes of a file that a recipe is given."""
    path = folder / name
    path.write_bytes(content)
    return answer(lambda: build(RECIPE.config, read_config_file(path)))


@few(150)
@given(content=damaged(YAML), name=st.sampled_from(["a.yaml", "a.json"]))
def test_damaged_files(folder: Path, content: bytes, name: str) -> None:
    used(folder, name, content)


@few(250)
@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=9),
    between=st.sampled_from(["", " ", "\n", "\n  "]),
)
def test_files_of_wild_yaml(folder: Path, pieces: list[str], between: str) -> None:
    used(folder, "a.yaml", between.join(pieces).encode("utf-8", "surrogatepass"))


@few(150)
@given(values=st.dictionaries(st.sampled_from([*config_fields(RECIPE.config), *TEXTS]), WILD, max_size=4))
def test_files_with_wild_values(folder: Path, values: dict[str, Any]) -> None:
    used(folder, "a.json", json.dumps(values).encode())
    used(folder, "b.yaml", yaml.safe_dump(values).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LAUGHS, "line 2, refers to another value"),
        ("a: &a [*a]\n", "refers to another value"),
        ("a: " + "[" * 5000, "nested"),
        ("a: !!python/object/apply:os.system [echo]\n", "YAML"),
        ("layers: 0x" + "f" * 5000, "layers must be a whole number.* too long"),
        ("layers: " + "9" * 5000, "cannot be read"),
        ("date: 2001-99-99", "cannot be read"),
        ("#" * (LARGEST + 1), "more than 65,536 bytes"),
    ],
)
def test_yaml_that_would_run_or_never_end(folder: Path, content: str, words: str) -> None:
    path = folder / "x.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        build(RECIPE.config, read_config_file(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 50_000, "nested"),
        ('{"layers": ' + "9" * 5000 + "}", "too long"),
        ('{"layers": 1, "layers": 2}', "'layers' twice"),
        ('{"scale": NaN}', "scale must be a number"),
        ('{"a\\u0000b": 1}', "There is no setting"),
    ],
)
def test_json_that_would_never_end(folder: Path, content: str, words: str) -> None:
    path = folder / "x.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        build(RECIPE.config, read_config_file(path))


@pytest.mark.parametrize("recipe", RECIPES)
def test_wild_settings_of_every_recipe(recipe: str, tmp_path: Path) -> None:
    """Whatever is asked for, what is taken has an identity, a command and a file inside of its folder."""
    chosen = RECIPES[recipe]
    known = config_fields(chosen.config)
    texts = st.sampled_from(
        [*TEXTS, "1e999", "nan", "-inf", "0", "-1", "1" * 400, "[" * 50, "none", "true", "1,2", "a/b", ".."]
    )

    @few(60)
    @given(st.dictionaries(st.sampled_from(list(known)), texts | WILD, min_size=1, max_size=3))
    def check(values: dict[str, Any]) -> None:
        config = answer(build, chosen.config, values)
        if not isinstance(config, UsageError):
            json.dumps(asdict(config))
            identity(chosen.name, config)
            command_line(chosen.name, config)
            path = Results(tmp_path).path(chosen, config)
            assert path.resolve().parent == (tmp_path / chosen.name).resolve()
            assert len(path.name.encode()) < 255

    check()


@few(80)
@given(pairs=st.lists(st.text(max_size=12) | st.sampled_from([f"layers={text}" for text in TEXTS]), max_size=3))
def test_wild_pairs(pairs: list[str]) -> None:
    answer(parse_pairs, RECIPE.config, pairs)
    answer(parse_values, RECIPE.config, dict.fromkeys(pairs, "x"))
