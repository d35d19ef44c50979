"""The grammar of `layers`, `at` and `tokens`."""

import typing
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from uncollapse import backbones
from uncollapse.backbones.select import Selection, check_tokens, final_places, select_layers, select_places
from uncollapse.backbones.sites import Layout, Stack
from uncollapse.cli import options

BLOCKS = (0, 1, 2)


@pytest.fixture(scope="module")
def stack() -> Stack:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return backbones.find(nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8), enable_nested_tensor=False))


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [
        (1, (1,)),
        (-1, (2,)),
        ([0, -1], (0, 2)),
        ([2, 0, 0], (0, 2)),
        (slice(1, None), (1, 2)),
        ("first 2", (0, 1)),
        ("last 2", (1, 2)),
        ("1:3", (1, 2)),
        (":-1", (0, 1)),
        ("::2", (0, 2)),
        (range(2), (0, 1)),
        ("first", (0,)),
        ("last", (2,)),
        ("block 1", (1,)),
        (["first", "block 1", -1], BLOCKS),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_forms_of_layers(stack: Stack, layers: Any, blocks: tuple[int, ...], ends: bool) -> None:
    assert select_layers(stack, layers, ends=ends) == Selection(blocks)


def test_layers_that_are_not_blocks(stack: Stack) -> None:
    assert select_layers(stack, "embed") == Selection(embed=True)
    assert select_layers(stack, ["final", "last 2"]) == Selection((1, 2), final=True)
    for everything in (None, "all", ["all"]):
        assert select_layers(stack, everything) == Selection(BLOCKS, embed=True, final=True)
        assert select_layers(stack, everything, ends=False) == Selection(BLOCKS)
    for layer in ("embed", "final", ["first", "final"]):
        with pytest.raises(ValueError, match="block"):
            select_layers(stack, layer, ends=False)
    bare = replace(stack, embed=None, final=None)
    assert select_layers(bare, None) == Selection(BLOCKS)
    for layer in ("embed", "final"):
        with pytest.raises(ValueError, match=f"'{layer}'"):
            select_layers(bare, layer)


def test_too_many_blocks_are_an_error_whose_examples_exist(stack: Stack) -> None:
    with pytest.raises(ValueError, match=r"has no layer 'last 4'\. It has 3 blocks\.") as error:
        select_layers(stack, "last 4")
    assert '"first 3", "last 3", "1:3"' in str(error.value)
    for example in ("first 3", "last 3", "1:3"):
        assert select_layers(stack, example).blocks


@pytest.mark.parametrize(
    "layers", [3, -4, [0, 7], [], "second", "first 9", "first 0", "middle 2", "a:b", "5:9", 1.5, [1.5], "0", ""]
)
def test_wrong_layers_list_what_there_is(stack: Stack, layers: Any) -> None:
    with pytest.raises(ValueError, match="-3 to 2") as error:
        select_layers(stack, layers)
    assert '"embed"' in str(error.value)
    with pytest.raises(ValueError, match="-3 to 2") as error:
        select_layers(stack, layers, ends=False)
    assert '"embed"' not in str(error.value)


def test_a_misspelt_layer_has_a_hint(stack: Stack) -> None:
    with pytest.raises(ValueError, match=r"'lost'.*'last'"):
        select_layers(stack, "lost")


def test_places(stack: Stack) -> None:
    numbered = replace(stack, numbers={4: "mlp.output"})
    assert select_places(stack, None) == ("block",)
    assert select_places(stack, ["block", "mlp.norm", "block"]) == ("block", "mlp.norm")
    assert select_places(numbered, (4, "block")) == ("mlp.output", "block")
    norms = ("attention.norm.input", "mlp.norm.input")
    assert select_places(stack, "norms") == norms
    assert select_places(stack, "norms", ends=True) == (*norms, "final.norm.input")
    assert select_places(stack, "final.norm", ends=True) == ("final.norm",)
    assert list(final_places(stack)) == ["final.norm.input", "final.norm"]
    assert final_places(replace(stack, final=None)) == final_places(replace(stack, layout="nodes")) == {}


@pytest.mark.parametrize(
    ("at", "word"),
    [("final.norm", "no place"), ("nowhere", "no place"), (7, "number 7"), ([], "at least"), (1.5, "at")],
)
def test_wrong_places_list_what_there_is(stack: Stack, at: Any, word: str) -> None:
    with pytest.raises(ValueError, match=rf"{word}.*block, attention\.input") as error:
        select_places(replace(stack, numbers={4: "mlp.output"}), at)
    assert "mlp.output (4)" in str(error.value)


def test_tokens() -> None:
    check_tokens("patches")
    check_tokens("all")
    with pytest.raises(ValueError, match="'some'"):
        check_tokens("some")


def test_the_command_line_knows_all_layouts() -> None:
    """It has its own list, because it starts without torch."""
    assert typing.get_args(options.Layout) == typing.get_args(Layout)
