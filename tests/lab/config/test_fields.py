"""Configurations from text and files, their identity, and the command that repeats them."""

import dataclasses
import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.slope import Config

from uncollapse.errors import UsageError
from uncollapse.lab.config import field_types, fields
from uncollapse.lab.config.fields import config_field, read_config_file


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("epochs", "16", 16),
        ("epochs", 16, 16),
        ("slope", "-.5", -0.5),
        ("slope", "1e-3", 1e-3),  # which YAML takes for text
        ("slope", 1, 1.0),
        ("shape", "none", "none"),  # a choice, not the absence of one
        ("noise", "none", None),
        ("noise", None, None),
        ("noise", "0.5", 0.5),
        ("steps", "3,4, 5", (3, 4, 5)),
        ("steps", [3, 4], (3, 4)),
        ("steps", "", ()),
        ("precision", "bf16", "bf16"),
        ("bias", "true", True),
        ("bias", "No", False),
        ("bias", True, True),
        ("weight-decay", "0.1", 0.1),
    ],
)
def test_values_get_the_type_of_their_field(name: str, text: Any, value: Any) -> None:
    config = fields.build(Config, {name: text})
    found = getattr(config, name.replace("-", "_"))
    assert (found, type(found)) == (value, type(value))
    assert {**dataclasses.asdict(config), name.replace("-", "_"): 0} == {
        **dataclasses.asdict(Config()),
        name.replace("-", "_"): 0,
    }


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("epochs", "1.5", "epochs must be a whole number, got '1.5'"),
        ("epochs", 1.5, "whole number"),
        ("epochs", True, "got 'true'"),
        ("epochs", None, "got 'none'"),
        ("slope", "steep", "a number"),
        ("slope", "nan", "got 'nan'"),
        ("slope", 10**400, "got '1" + "0" * 197 + "…"),
        ("shape", "lin", "one of line, none, got 'lin'. Did you mean 'line'?"),
        ("shape", False, "quotes"),
        ("noise", "some", "a number or none"),
        ("steps", "1,x", "commas"),
        ("steps", 3, "commas"),
        ("precision", "bf17", "Did you mean 'bf16'?"),
        ("bias", "maybe", "true or false"),
        ("slop", 1, "Did you mean 'slope'? There are: slope, epochs, "),
        ("slope", 10, "[-9, 9]"),  # the configuration's own check
    ],
)
def test_bad_values(name: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        fields.build(Config, {name: value})


@dataclass(frozen=True)
class Words:
    pair: tuple[int, float] = config_field((1, 1.0), "Two numbers.")
    names: tuple[str, ...] = config_field((), "Some.", choices=("a", "b"))
    share: float | None = config_field(0.5, "A share.", minimum=0, maximum=1)
    shares: tuple[float, ...] = config_field((), "Some shares.", minimum=0, maximum=1)
    rest: str | int | None = "x"  # declared without `config_field`
    seed: int = 0


def test_tuples_of_a_length_and_with_choices() -> None:
    assert fields.build(Words, {"pair": "2,3", "names": "b,a", "rest": 3}) == Words((2, 3.0), ("b", "a"), rest=3)
    with pytest.raises(UsageError, match="pair"):
        fields.build(Words, {"pair": "2"})
    with pytest.raises(UsageError, match="a, b"):
        fields.build(Words, {"names": "a,c"})


def test_bounds() -> None:
    assert fields.build(Words, {"share": "1", "shares": "0,1"}) == Words(share=1.0, shares=(0.0, 1.0))
    assert fields.build(Words, {"share": "none"}).share is None
    for name, value in (("share", 1.5), ("share", "-0.1"), ("shares", "0.5,1.5")):
        with pytest.raises(UsageError, match=name):
            fields.build(Words, {name: value})


def test_a_union_reads_its_first_member_that_fits() -> None:
    assert (field_types.parse("5", int | str), field_types.parse("5", str | int)) == (5, "5")


def test_the_identity_is_of_what_differs_from_the_defaults() -> None:
    @dataclass(frozen=True)
    class Grown(Config):
        added: int = 0

    config = Config(slope=3.0, steps=(4,))
    written = '["slope",{"slope":3.0,"steps":[4]}]'  # pinned: files of results are found by it
    assert fields.identity("slope", config) == hashlib.sha256(written.encode()).hexdigest()[:10]
    assert fields.identity("slope", Grown(slope=3.0, steps=(4,))) == fields.identity("slope", config)
    others = [Grown(slope=3.0, steps=(4,), added=1), Config(), Config(slope=3.0), dataclasses.replace(config, seed=1)]
    assert len({fields.identity("slope", other) for other in [*others, config]}) == 5
    assert fields.identity("other", config) != fields.identity("slope", config)


def test_the_identity_does_not_depend_on_how_a_number_was_written() -> None:
    assert fields.identity("slope", Config(slope=1)) == fields.identity("slope", Config(slope=1.0))
    assert fields.identity("words", Words(pair=(1, 2))) == fields.identity("words", Words(pair=(1, 2.0)))


def test_the_command_has_only_what_differs() -> None:
    assert fields.command_line("slope", Config()) == "uncollapse train slope"
    config = Config(slope=-0.5, noise=0.1, steps=(4, 8), bias=True, weight_decay=5e-4, seed=3)
    words = "--slope -0.5 --noise 0.1 --steps 4,8 --bias --weight-decay 0.0005 --seed 3"
    assert fields.command_line("slope", config) == f"uncollapse train slope {words}"


@dataclass(frozen=True)
class Anything:
    number: float = 0.0
    count: int | None = 1
    text: str = "x"
    texts: tuple[str, ...] = ("x",)
    yes: bool = True
    seed: int = 0


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        Anything,
        st.floats(allow_nan=False, allow_infinity=False),
        st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
        st.text(),
        st.lists(st.text()).map(tuple),
        st.booleans(),
        st.integers(-(2**63) + 1, 2**63 - 1),
    )
)
def test_the_command_repeats_the_configuration(config: Anything) -> None:
    values, words = {}, iter(shlex.split(fields.command_line("any", config))[3:])
    for flag in words:
        name = flag.removeprefix("--")
        values[name.removeprefix("no-")] = flag == "--yes" if name.endswith("yes") else next(words)
    assert fields.build(Anything, values) == config


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# how\nslope: 1e-1\nsteps: [1, 2]\nnoise: null\n", encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps({"weight-decay": 0.5}), encoding="utf-8")
    (tmp_path / "empty.yml").write_text("# nothing\n", encoding="utf-8")
    assert read_config_file(tmp_path / "a.yaml") == {"slope": "1e-1", "steps": [1, 2], "noise": None}
    assert read_config_file(tmp_path / "b.json") == {"weight-decay": 0.5}
    assert read_config_file(tmp_path / "empty.yml") == {}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "", r"\.yaml, \.yml, \.json, got .*a\.toml"),
        (".", None, r"ends in \.yaml, \.yml, \.json, got '[^']*'\.$"),
        ("a.yaml", "a: 1\nb: [1\n", r"a\.yaml, line 3.*YAML"),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", "line 1 and again in line 3"),
        ("a.yaml", "- 1\n- 2\n", r"names with values.*got '\[1, 2\]'"),
        ("a.yaml", "1: 2\n", "names with values"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []\n", r"a\.yaml, line 1.*YAML"),
        ("a.json", '{"a": 1,\n}', r"a\.json, line \d.*JSON"),
        ("a.json", '{"a": 1, "a": 2}', "'a' twice"),
        ("a.json", "[]", "names with values"),
        ("a.json", b"\xff\xfe\xff", "UTF-8"),
        ("a.json", None, r"a\.json.*No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str | bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UsageError, match=words):
        read_config_file(tmp_path / name)
