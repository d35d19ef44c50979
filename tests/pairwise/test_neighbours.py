"""The nearest key against the matrix of all distances, on one tile and on many."""

import pytest
import torch
from torch import Tensor

from uncollapse import pairwise
from uncollapse.pairwise import grid, nearest


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many tiles":
        monkeypatch.setitem(grid.TILE, "cpu", (8, 1 << 7))


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(q: Tensor, k: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest of all distances; `keep` (..., n, m) says which pairs count."""
    apart = (q.unsqueeze(-2) - k.unsqueeze(-3)).norm(dim=-1).masked_fill(~keep, torch.inf)
    distance, key = apart.min(-1)
    return distance, key.masked_fill(~keep.any(-1), -1)


CASES = {
    "all": {},
    "self": {"exclude": "self"},
    "causal": {"causal": True},
    "causal without self": {"causal": True, "exclude": "self"},
    "pairs": {"exclude": torch.tensor([[0, 0, 5, 29], [1, 3, 5, 0]])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_is_the_smallest_of_all_distances(tiles: None, case: str, masked: bool) -> None:
    q, k = rows(2, 30, 3).requires_grad_(), rows(2, 30, 3, seed=1).requires_grad_()
    options = CASES[case]
    mask = rows(2, 30, seed=2) > 0 if masked else None
    keep = torch.ones(2, 30, 30, dtype=torch.bool)
    keep = keep.tril() if options.get("causal") else keep
    if isinstance(options.get("exclude"), str):
        keep &= ~torch.eye(30, dtype=torch.bool)
    elif "exclude" in options:
        keep[:, options["exclude"][0], options["exclude"][1]] = False
    keep = keep if mask is None else keep & mask[:, None]
    found, (distance, key) = nearest(q, k, mask=mask, **options), dense(q, k, keep)
    assert torch.equal(found.key, key)
    torch.testing.assert_close(found.distance, distance, rtol=1e-12, atol=0)
    some = distance.isfinite()
    slopes = [torch.autograd.grad(d[some].square().sum(), (q, k)) for d in (found.distance, distance)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-11, atol=1e-13)


def test_among_themselves(tiles: None) -> None:
    x = rows(40, 4).requires_grad_()
    found = nearest(x, x, exclude="self")
    distance, key = dense(x, x, ~torch.eye(40, dtype=torch.bool))
    assert torch.equal(found.key, key)
    slopes = [torch.autograd.grad(d.sum(), x)[0] for d in (found.distance, distance)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-11, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x: nearest(x, x, exclude="self").distance, rows(6, 3).requires_grad_())


def test_masked_keys_may_hold_anything(tiles: None) -> None:
    x, mask = rows(20, 3), rows(20, seed=1) > 0
    real = nearest(x, x[mask])
    x_bad = x.masked_fill(~mask[:, None], torch.nan)
    found = nearest(x, x_bad, mask=mask)
    assert torch.equal(found.distance, real.distance)
    assert torch.equal(found.key, mask.nonzero().squeeze(1)[real.key])


def test_nothing_left() -> None:
    x = rows(1, 3).requires_grad_()
    for found in (nearest(x, x, exclude="self"), nearest(x, x[:0]), nearest(x, x, mask=torch.tensor([False]))):
        assert found.distance.item() == torch.inf
        assert found.key.item() == -1
        assert (
            torch.autograd.grad(found.distance.masked_fill(found.distance == torch.inf, 0).sum(), x)[0].abs().max() == 0
        )
    assert nearest(x[:0], x).distance.shape == (0,)


def test_the_first_of_equal_rows_without_a_gradient() -> None:
    x = torch.ones(5, 3, requires_grad=True)
    found = nearest(x, x, exclude="self")
    assert found.key.tolist() == [1, 0, 0, 0, 0]
    assert found.distance.abs().max() == 0
    assert torch.autograd.grad(found.distance.sum(), x)[0].abs().max() == 0


def test_far_from_the_origin_neighbours_are_still_found() -> None:
    x = rows(60, 3)
    near = nearest(x.float(), x.float(), exclude="self").key
    far = (x * 2**-6).float() + 1000  # spacing there is 2⁻¹⁴
    apart = dense(far.double(), far.double(), ~torch.eye(60, dtype=torch.bool))
    found = nearest(far, far, exclude="self")
    torch.testing.assert_close(found.distance.double(), apart[0], rtol=1e-6, atol=0)
    assert (found.key == near).double().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = rows(30, 4).to(dtype)
    found = nearest(x, x, exclude="self")
    assert found.distance.dtype == torch.float32
    torch.testing.assert_close(found.distance.double(), nearest(x.double(), x.double(), exclude="self").distance)


def test_nan_is_not_hidden() -> None:
    x = rows(9, 3)
    x[4, 1] = torch.nan
    assert nearest(x, x, exclude="self").distance[4].isnan()


def test_compiles_without_a_break() -> None:
    x = rows(20, 3).requires_grad_()
    compiled = torch.compile(
        lambda x: nearest(x, x, exclude="self").distance.sum(), fullgraph=True, backend="aot_eager"
    )
    expected = nearest(x, x, exclude="self").distance.sum()
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(expected, x))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="keys"):
        nearest(rows(3, 2), rows(4, 2), exclude="self")
    with pytest.raises(ValueError, match="features"):
        nearest(rows(3, 2), rows(4, 3))
    with pytest.raises(TypeError, match="bool"):
        pairwise.nearest(rows(3, 2), rows(4, 2), mask=torch.ones(4))
