"""Encoders of sentences: masks, pools, sides of a pair."""

from typing import Any

import pytest
import torch
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.models.sentence_encoder import Encoders, SentenceEncoder, pool, sinusoids

IDS = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0], [4, 0, 0, 0]])
MASK = IDS != 0
MODELS: list[dict[str, Any]] = [
    {"kind": "gru"},
    {"kind": "gru", "bidirectional": True, "depth": 2},
    {"kind": "transformer", "depth": 2, "heads": 2},
]


def encoder(seed: int = 0, **sizes: Any) -> SentenceEncoder:
    torch.manual_seed(seed)
    return SentenceEncoder(12, **{"embedding": 6, "width": 8, "dim": 5} | sizes).double().eval()


@pytest.mark.parametrize("pooling", ["mean", "max", "last"])
@pytest.mark.parametrize("sizes", MODELS, ids=["gru", "bidirectional", "transformer"])
def test_padding_is_the_same_as_none(sizes: dict[str, Any], pooling: str) -> None:
    model = encoder(pooling=pooling, **sizes)
    together = model.layers(IDS, MASK)
    assert list(together) == ["words", *(f"block {n + 1}" for n in range(sizes.get("depth", 1))), "output"]
    assert together["output"].shape == (3, 5)
    assert together[model.features].shape == (3, 8)
    for number, row in enumerate(IDS):
        alone = row[row != 0][None]
        for name, found in model.layers(alone, alone != 0).items():
            torch.testing.assert_close(together[name][number], found[0])


@pytest.mark.parametrize("sizes", MODELS, ids=["gru", "bidirectional", "transformer"])
def test_the_order_of_the_words_counts(sizes: dict[str, Any]) -> None:
    model = encoder(**sizes)
    turned = IDS[:1].flip(1)
    assert not torch.allclose(model(IDS[:1], MASK[:1]), model(turned, turned != 0), atol=1e-6)
    assert not torch.allclose(model(IDS[:1], MASK[:1]), model(IDS[:1, :3], MASK[:1, :3]), atol=1e-6)


def test_a_gru_is_torchs_own() -> None:
    model = encoder(bidirectional=True, pooling="last")
    states, last = model.blocks[0](model.embed(IDS[:1]))
    torch.testing.assert_close(model.layers(IDS, MASK)["block 1"][0], torch.cat([last[0, 0], last[1, 0]]))
    assert states.shape == (1, 4, 8)


def test_pools_read_real_words_alone() -> None:
    x = torch.tensor([[[1.0, -2.0], [3.0, -4.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, False]])
    found = [pool(x, mask, how).tolist() for how in ("mean", "max", "last")]
    assert found == [[[2.0, -3.0]], [[3.0, -2.0]], [[3.0, -4.0]]]


@pytest.mark.parametrize("sizes", MODELS, ids=["gru", "bidirectional", "transformer"])
def test_sentences_differ_at_the_start(sizes: dict[str, Any]) -> None:
    model = encoder(**sizes | {"width": 16})
    ids = torch.randint(1, 12, (40, 6), generator=torch.Generator().manual_seed(0))
    rows = torch.nn.functional.normalize(model(ids, ids != 0).detach(), dim=1)
    assert float((rows @ rows.T).mean()) < 0.9


def test_blocks_of_a_transformer_start_differently() -> None:
    one, two = (next(block.parameters()) for block in encoder(kind="transformer", depth=2).blocks)
    assert not torch.equal(one, two)


def test_waves_tell_positions_apart() -> None:
    found = sinusoids(torch.zeros(1, 50, 8, dtype=torch.float64))
    assert found.shape == (50, 8)
    torch.testing.assert_close(found[0], torch.tensor([0.0] * 4 + [1.0] * 4, dtype=torch.float64))
    torch.testing.assert_close(found.square().sum(1), torch.full((50,), 4.0, dtype=torch.float64))
    assert len(torch.unique(found, dim=0)) == 50


def test_no_output_gives_the_features() -> None:
    found = encoder(dim=0).layers(IDS, MASK)
    assert torch.equal(found["output"], found["block 1"])


def sides(model: Encoders) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = model(torch.cat([IDS, IDS.flip(0)]), torch.cat([MASK, MASK.flip(0)]))
    return found


def test_one_encoder_reads_both_sides() -> None:
    one = encoder()
    x, y = sides(Encoders(one))
    torch.testing.assert_close(x, one(IDS, MASK))
    torch.testing.assert_close(y, x.flip(0))


def test_two_encoders_read_a_side_each_and_are_joined_to_be_judged() -> None:
    one, two = encoder(0), encoder(1)
    both = Encoders(one, two)
    x, y = sides(both)
    torch.testing.assert_close(x, one(IDS, MASK))
    torch.testing.assert_close(y, two(IDS.flip(0), MASK.flip(0)))
    found = both.layers(IDS, MASK)[both.features]
    torch.testing.assert_close(found, torch.cat([m.layers(IDS, MASK)["block 1"] for m in (one, two)], dim=1))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"bidirectional": True, "width": 9}, "width of this gru must be a multiple of 2, got 9"),
        ({"kind": "transformer", "heads": 3}, "width of this transformer must be a multiple of 6, got 8"),
    ],
)
def test_widths_that_do_not_fit_are_told(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        encoder(**sizes)
