"""What every registered metric must do, tested the day it is registered."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import uncollapse.metrics as metrics
from uncollapse.registry import METRICS, Metric

EVERY = list(METRICS.values())
ON_TOKENS = [m for m in EVERY if m.needs == ("tokens",) and "mask" in inspect.signature(m.function).parameters]
SLACK = 1e-6
# what a test of equality between two orders of summation in float64 allows, relative to values of order 1 to 100
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def named(metric: Metric) -> str:
    return metric.name


def make(need: str, generator: torch.Generator, n: int = 8, d: int = 5) -> Tensor:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    makers: dict[str, Callable[[], Tensor]] = {
        "tokens": lambda: normal(n, d),
        "pairs": lambda: normal(n, d),
        "attention": lambda: normal(3, n, n).softmax(-1),
        "edges": lambda: torch.randint(0, n, (2, 3 * n), generator=generator),
        "labels": lambda: torch.arange(n) % 3,
        "views": lambda: normal(n, 4, d),
        "patches": lambda: normal(4, n, d),
    }
    return makers[need]()


def arguments(metric: Metric, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [make(need, generator) for need in metric.needs]
    return [a.to(dtype) if a.is_floating_point() else a for a in made]


def test_all_metrics_are_exported() -> None:
    plain = {"singular_values", "uniformity_optimum", "uniformity_gap"}  # no measures of collapse of their own
    plain |= {"Interval", "alignment_interval", "uniformity_interval"}
    for name in {*metrics.__all__} - plain:
        assert getattr(metrics, name) is METRICS[name].function


@pytest.mark.parametrize("metric", EVERY, ids=named)
def test_docstring_has_paper_and_example(metric: Metric) -> None:
    doc = inspect.getdoc(metric.function) or ""
    assert any(source in doc for source in ("arXiv", "bioRxiv", "NeurIPS"))
    assert f">>> {metric.name}(" in doc
    assert "Returns:" in doc
    assert metric.paper


@pytest.mark.parametrize("metric", EVERY, ids=named)
@pytest.mark.parametrize("seed", range(3))
def test_value_is_finite_and_within_bounds(metric: Metric, seed: int) -> None:
    value = metric.function(*arguments(metric, seed=seed))
    low, high = metric.bounds
    assert value.shape == ()
    assert bool(torch.isfinite(value))
    assert low is None or float(value) >= low - SLACK
    assert high is None or float(value) <= high + SLACK


@pytest.mark.parametrize("metric", EVERY, ids=named)
def test_float64_stays_and_others_become_float32(metric: Metric) -> None:
    exact = metric.function(*arguments(metric))
    single = metric.function(*arguments(metric, torch.float32))
    assert (exact.dtype, single.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("metric", EVERY, ids=named)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_is_computed_in_float32(metric: Metric, half: torch.dtype) -> None:
    given_half = arguments(metric, half)
    value = metric.function(*given_half)
    assert value.dtype == torch.float32
    same_values = [a.double() if a.is_floating_point() else a for a in given_half]
    torch.testing.assert_close(value.double(), metric.function(*same_values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("metric", EVERY, ids=named)
def test_autocast_changes_nothing(metric: Metric) -> None:
    args = arguments(metric, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = metric.function(*args)
    assert torch.equal(value, metric.function(*args))


@pytest.mark.parametrize("metric", EVERY, ids=named)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused(metric: Metric, bad: float) -> None:
    args = arguments(metric, torch.float32)
    for i, (arg, name) in enumerate(zip(args, inspect.signature(metric.function).parameters, strict=False)):
        if arg.is_floating_point():
            broken = arg.clone()
            broken.view(-1)[2:4] = bad
            with pytest.raises(ValueError, match=f"^{name}.*2 NaN"):
                metric.function(*args[:i], broken, *args[i + 1 :])


@pytest.mark.parametrize("metric", [m for m in EVERY if "attention" not in m.needs], ids=named)
def test_large_finite_values_are_not_taken_for_inf(metric: Metric) -> None:
    args = arguments(metric, torch.float32)
    assert not bool(metric.function(*[a * 1e12 if a.is_floating_point() else a for a in args]).isnan())


@pytest.mark.parametrize("metric", EVERY, ids=named)
def test_integers_are_refused(metric: Metric) -> None:
    first, *others = arguments(metric)
    with pytest.raises(TypeError, match="floating-point"):
        metric.function(first.long(), *others)


@pytest.mark.parametrize("metric", EVERY, ids=named)
def test_gradient_is_finite(metric: Metric) -> None:
    args = [a.requires_grad_() if a.is_floating_point() else a for a in arguments(metric)]
    metric.function(*args).backward()
    grads = [a.grad for a in args if a.is_floating_point()]
    assert all(g is not None and bool(torch.isfinite(g).all()) for g in grads)
    assert any(g is not None and bool((g != 0).any()) for g in grads)


@pytest.mark.parametrize("metric", ON_TOKENS, ids=named)
@pytest.mark.parametrize("kind", ["zero", "equal", "one_token", "all_masked", "one_real"])
def test_collapsed_tokens_give_finite_values_and_gradients(metric: Metric, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    mask = None
    if kind == "zero":
        x = torch.zeros_like(x)
    if kind == "equal":
        x = x[:, :1].repeat(1, 6, 1)
    if kind == "one_token":
        x = x[:, :1].clone()
    if kind == "all_masked":
        mask = torch.zeros(2, 6, dtype=torch.bool)
    if kind == "one_real":
        mask = torch.arange(6).expand(2, 6) == 2
    x.requires_grad_()
    value = metric.function(x, mask=mask)
    value.sum().backward()
    low, high = metric.bounds
    assert value.shape == (2,)
    assert bool(torch.isfinite(value).all())
    assert low is None or bool((value >= low - SLACK).all())
    assert high is None or bool((value <= high + SLACK).all())
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("metric", ON_TOKENS, ids=named)
def test_bad_shapes_and_masks_are_refused(metric: Metric) -> None:
    x = torch.ones(2, 4, 3)
    with pytest.raises(ValueError, match="shape"):
        metric.function(torch.ones(4))
    with pytest.raises(TypeError, match=r"mask.*bool"):
        metric.function(x, mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"mask.*\(2, 4\)"):
        metric.function(x, mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask.*shape"):
        metric.function(x, mask=torch.ones(5, 2, 4, dtype=torch.bool))


@st.composite
def token_cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Tokens (b, n, d) in float64, a mask, and a seed; some rows zero, some equal."""
    b, n, d = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 7))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, n, d, generator=generator, dtype=torch.float64) * draw(st.sampled_from([1e-3, 1.0, 50.0]))
    x += draw(st.sampled_from([0.0, 3.0]))
    if draw(st.booleans()):
        x[:, 0] = 0
    if n > 2 and draw(st.booleans()):
        x[:, 1] = x[:, 2]
    mask = torch.rand(b, n, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.1]))
    return x, mask, seed


@pytest.mark.parametrize("metric", ON_TOKENS, ids=named)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=token_cases())
def test_batches_masks_and_permutations(metric: Metric, case: tuple[Tensor, Tensor, int]) -> None:
    x, mask, seed = case
    generator = torch.Generator().manual_seed(seed)
    batched = metric.function(x, mask=mask)
    looped = torch.stack([metric.function(row, mask=keep) for row, keep in zip(x, mask, strict=True)])
    torch.testing.assert_close(batched, looped, **EXACT)
    for row, keep, value in zip(x, mask, batched, strict=True):
        torch.testing.assert_close(value, metric.function(row[keep]), **EXACT)  # masked = deleted
    order = torch.randperm(x.shape[1], generator=generator)
    torch.testing.assert_close(metric.function(x[:, order], mask=mask[:, order]), batched, **EXACT)
    spoilt = x.masked_fill(~mask[..., None], float("nan"))
    torch.testing.assert_close(metric.function(spoilt, mask=mask), batched, rtol=0, atol=0)
    torch.testing.assert_close(
        metric.function(x[None, :, None], mask=mask[None, :, None]), batched[None, :, None], **EXACT
    )


@pytest.mark.parametrize("metric", ON_TOKENS, ids=named)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=token_cases(), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_every_dtype_stays_near_float64(metric: Metric, case: tuple[Tensor, Tensor, int], dtype: torch.dtype) -> None:
    x, mask, _ = case
    x = x.to(dtype)
    value, exact = metric.function(x, mask=mask), metric.function(x.double(), mask=mask)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("metric", ON_TOKENS, ids=named)
def test_masked_rows_get_no_gradient(metric: Metric) -> None:
    x = make("tokens", torch.Generator().manual_seed(3))
    x[4:] = float("nan")
    x.requires_grad_()
    metric.function(x, mask=torch.arange(8) < 4).backward()
    assert x.grad is not None
    assert bool((x.grad[4:] == 0).all())
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("metric", ON_TOKENS, ids=named)
def test_a_shared_mask_broadcasts(metric: Metric) -> None:
    x = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mask = torch.arange(8) < 6
    torch.testing.assert_close(metric.function(x, mask=mask), metric.function(x, mask=mask.expand(3, 8)), **EXACT)


@pytest.mark.parametrize("metric", ON_TOKENS, ids=named)
def test_compiles_into_one_graph(metric: Metric) -> None:
    def total(x: Tensor, mask: Tensor) -> Tensor:
        value: Tensor = metric.function(x, mask=mask).sum()
        return value

    torch.compiler.reset()
    x = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)
    mask = torch.arange(8).expand(2, 8) < 6
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)(x, mask)
    (slope,) = torch.autograd.grad(compiled, x)
    plain = total(x, mask)
    torch.testing.assert_close(compiled, plain, **EXACT)
    torch.testing.assert_close(slope, torch.autograd.grad(plain, x)[0], **EXACT)
