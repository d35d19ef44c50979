"""Products of tiles: the same by oneDNN and by torch's BLAS, however the matrices lie in memory."""

import pytest
import torch
from torch import Tensor

from uncollapse.pairwise import products, softmax_mean

SIZES = [(1, 40, 24, 33), (3, 7, 90, 12), (2, 1, 5, 1)]  # batch, rows, summed, columns


@pytest.fixture(params=[False, True], ids=["blas", "onednn"])
def one_dnn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether oneDNN multiplies, also small matrices."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(products, "_is_faster", lambda: request.param)
    monkeypatch.setattr(products, "_has_wide_vectors", lambda: True)
    return bool(request.param)


def matrices(*shape: int, layout: str = "dense", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if layout == "transposed":
        return torch.randn(shape[0], shape[2], shape[1], generator=generator).mT
    if layout == "sliced":
        return torch.randn(shape[0], shape[1], shape[2] + 3, generator=generator)[..., 2:-1]
    return torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced"])
def test_a_product_is_that_in_float64(one_dnn: bool, size: tuple[int, ...], layout: str) -> None:
    b, r, d, m = size
    left, right, out = matrices(b, r, d, layout=layout), matrices(b, m, d, layout=layout, seed=1), torch.empty(b, r, m)
    found = products.multiply(left, right, 1.5, out)
    assert found is out
    torch.testing.assert_close(found.double(), 1.5 * left.double() @ right.double().mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced"])
def test_a_product_is_added(one_dnn: bool, size: tuple[int, ...], layout: str, beta: float) -> None:
    b, r, m, e = size
    left, right = matrices(b, r, m, layout=layout), matrices(b, m, e, layout="sliced", seed=1)
    whole = matrices(b, r + 4, e, seed=2) if beta else torch.full((b, r + 4, e), torch.nan)
    expected = left.double() @ right.double() * 0.5 + (whole[:, 2:-2].double() if beta else 0)
    edges = whole[:, :2].clone()
    products.accumulate(whole[:, 2:-2], left, right, beta, 0.5)
    torch.testing.assert_close(whole[:, 2:-2].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[:, :2], edges, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_float32_in_full_precision_goes_to_one_dnn(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(products, "_is_faster", lambda: True)
    large = torch.zeros(1, 512, 512)
    assert products.pays(large, 64)
    assert not products.pays(large.to(dtype), 64)
    assert not products.pays(large[:, :8], 8)
    for wide in (True, False):  # a batch is one call of the BLAS, which is worth it on narrow vectors
        monkeypatch.setattr(products, "_has_wide_vectors", lambda wide=wide: wide)
        assert products.pays(large.repeat(2, 1, 1), 64) == wide
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert not products.pays(large, 64)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("maker", "family", "wide"), [("AuthenticAMD", 26, True), ("AuthenticAMD", 25, False), ("GenuineIntel", 26, False)]
)
def test_processors_with_wide_vectors(monkeypatch: pytest.MonkeyPatch, maker: str, family: int, wide: bool) -> None:
    told = f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 2\n"
    monkeypatch.setattr(products, "_processor", lambda: told)
    products._has_wide_vectors.cache_clear()
    assert products._has_wide_vectors() == wide
    monkeypatch.setattr(products, "_processor", lambda: "")
    products._has_wide_vectors.cache_clear()
    assert not products._has_wide_vectors()
    products._has_wide_vectors.cache_clear()


def test_an_operator_that_is_missing_or_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Tensor, weight: Tensor) -> Tensor:
        raise AttributeError("no such operator")

    for broken in (fail, lambda x, weight: (x @ weight.mT) * 1.01):
        monkeypatch.setattr(products, "linear", broken)
        products._is_faster.cache_clear()
        assert not products._is_faster()
    monkeypatch.undo()
    products._is_faster.cache_clear()


def test_the_kernel_gives_the_same_with_both(one_dnn: bool) -> None:
    x, y = matrices(2, 50, 16).requires_grad_(), matrices(2, 30, 16, seed=1).requires_grad_()
    value = softmax_mean(x, y, y, temperature=0.7)
    found = torch.autograd.grad(value.square().sum(), (x, y))
    a, b = (z.detach().double().requires_grad_() for z in (x, y))
    exact = (a @ b.mT / 0.7).softmax(-1) @ b
    expected = torch.autograd.grad(exact.square().sum(), (a, b))
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
