"""The parts of a batch that processes take are the batch, in its order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from uncollapse.lab.data.image.image_batches import ImageBatch, ImageBatches
from uncollapse.lab.data.image.two_views import ImagesInMemory, MemoryBatches
from uncollapse.lab.data.text.encoded_texts import EncodedTexts
from uncollapse.lab.engine.sharding import count_rows, shard_slice
from uncollapse.lab.engine.task import Shareable
from uncollapse.lab.experiments.glue.training import Batches as TextBatches
from uncollapse.lab.experiments.sentences.training import PairBatches as PairBatches


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 5, 8])
def test_slices(size: int, count: int) -> None:
    parts = [list(range(size))[shard_slice(size, number, count)] for number in range(count)]
    assert [row for own in parts for row in own] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_rows() -> None:
    x = torch.ones(3, 2)
    assert [count_rows(batch) for batch in (x, (x, x), [x], {"x": x, "y": x}, ImageBatch(x, x[:, 0]))] == [3] * 5


class Tones:
    """Ten pictures of one color each, as the lab has them; the third cannot be read."""

    labels = torch.arange(10)

    def __len__(self) -> int:
        return 10

    def image(self, at: int) -> Any:
        from uncollapse.lab.data.image.image_source import UnreadableError

        if at == 3:
            raise UnreadableError("torn")
        return at


def noisy(picture: Any) -> Tensor:
    return torch.full((3, 1, 1), float(picture)) + torch.rand(1)


def texts() -> EncodedTexts:
    sizes = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    ids = torch.arange(int(sizes.sum()), dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    return EncodedTexts(ids, starts, None, torch.arange(10), 0)


ORDER = [7, 2, 3, 9, 0, 1, 4, 5, 8]
GROUPS = list(torch.split(torch.tensor(ORDER), 4))
PAIRS = list(torch.split(torch.tensor(ORDER[:8]).reshape(4, 2), 3))
MADE: dict[str, Callable[[], Any]] = {
    "pictures": lambda: ImageBatches(Tones(), ORDER, 4, noisy, seed=3),  # type: ignore[arg-type]
    "held": lambda: MemoryBatches(ImagesInMemory(torch.arange(30).reshape(10, 3, 1, 1), torch.arange(10)), ORDER, 4),
    "texts": lambda: TextBatches(texts(), GROUPS, pad_to=8),
    "pairs": lambda: PairBatches(texts(), PAIRS),
}
FIRST: dict[str, Callable[[Any], Tensor]] = {  # what tells the rows of a batch
    "pictures": lambda batch: batch.images,
    "held": lambda batch: batch.images,
    "texts": lambda batch: batch["input_ids"],
    "pairs": lambda batch: batch.ids.reshape(2, -1, batch.ids.shape[1])[:, :, 0].T,
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", MADE)
def test_shares_make_the_whole(kind: str, count: int) -> None:
    whole, shares = list(MADE[kind]()), []
    for number in range(count):
        made = MADE[kind]()
        assert isinstance(made, Shareable)
        shares.append(list(made.share(number, count)))
    assert [len(each) for each in shares] == [len(whole)] * count
    for at, batch in enumerate(whole):
        parts = [FIRST[kind](each[at]) for each in shares if count_rows(each[at])]
        assert torch.equal(torch.cat(parts), FIRST[kind](batch))
        assert sum(count_rows(each[at]) for each in shares) == count_rows(batch)


@pytest.mark.parametrize("kind", ["pictures", "held", "pairs"])
def test_a_share_can_begin_later(kind: str) -> None:
    own = MADE[kind]().share(1, 2)
    assert torch.equal(FIRST[kind](next(iter(own.after(1)))), FIRST[kind](list(own)[1]))
