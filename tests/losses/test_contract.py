"""What every loss in the registry keeps, so that a new one is tested the day it is added."""

import inspect

import pytest
import torch
from torch import Tensor

import uncollapse.losses
from uncollapse.registry import LOSSES

SHAPE = (12, 6)


def inputs(needs: tuple[str, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def rows() -> Tensor:
        return torch.randn(*SHAPE, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    make = {
        "tokens": rows,
        "pairs": rows,
        "logits": rows,
        "labels": lambda: torch.randint(SHAPE[1], SHAPE[:1], generator=generator),
    }
    return [make[need]() for need in needs]


@pytest.fixture(params=sorted(LOSSES))
def entry(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    return LOSSES[request.param]


def value_of(entry, *given: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)  # some losses draw random directions
    return entry.function(*given)


def test_all_exported_losses_are_registered() -> None:
    functions = {n for n in uncollapse.losses.__all__ if inspect.isfunction(getattr(uncollapse.losses, n))}
    assert functions - {"cutmix_patches"} == set(LOSSES)


def test_facts_and_docstring(entry) -> None:  # type: ignore[no-untyped-def]
    doc = inspect.getdoc(entry.function)
    assert "arXiv" in entry.paper
    assert all(part in doc for part in ("arXiv", "Args:", "Returns:", ">>>"))
    names = list(inspect.signature(entry.function).parameters)
    assert all(f"    {name}: " in doc for name in names), "each argument is described"
    assert len(entry.needs) <= len(names)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scalar_finite_and_differentiable(entry, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    given = inputs(entry.needs, dtype)
    value = value_of(entry, *given)
    assert value.shape == ()
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value.isfinite()
    value.backward()
    for tensor in given:
        if tensor.requires_grad:
            assert tensor.grad.dtype == dtype
            assert tensor.grad.isfinite().all()
            assert tensor.grad.abs().max() > 0


def test_nan_is_not_hidden(entry) -> None:  # type: ignore[no-untyped-def]
    given = [t.detach().clone() for t in inputs(entry.needs, torch.float32)]
    for tensor in given:
        if tensor.is_floating_point():
            tensor[3, 2] = torch.nan
            assert value_of(entry, *given).isnan()
            tensor[3, 2] = 0.0


def test_half_precision_is_only_in_the_input(entry) -> None:  # type: ignore[no-untyped-def]
    half = [t.detach() for t in inputs(entry.needs, torch.bfloat16)]
    exact = value_of(entry, *[t.double() if t.is_floating_point() else t for t in half])
    assert float(value_of(entry, *half)) == pytest.approx(float(exact), rel=1e-5, abs=1e-6)


def test_order_of_rows_does_not_matter(entry) -> None:  # type: ignore[no-untyped-def]
    given = [t.detach() for t in inputs(entry.needs, torch.float64)]
    order = torch.randperm(SHAPE[0], generator=torch.Generator().manual_seed(1))
    assert float(value_of(entry, *[t[order] for t in given])) == pytest.approx(
        float(value_of(entry, *given)), rel=1e-12
    )


def test_autocast_changes_nothing(entry) -> None:  # type: ignore[no-untyped-def]
    given = [t.detach() for t in inputs(entry.needs, torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = value_of(entry, *given)
    assert inside.dtype == torch.float32
    assert float(inside) == pytest.approx(float(value_of(entry, *given)), rel=1e-6, abs=1e-7)


def test_one_row_is_finite(entry) -> None:  # type: ignore[no-untyped-def]
    given = [t.detach()[:1].requires_grad_(t.is_floating_point()) for t in inputs(entry.needs, torch.float32)]
    value = value_of(entry, *given)
    assert value.isfinite()
    if value.requires_grad:
        value.backward()
        assert all(t.grad.isfinite().all() for t in given if t.grad is not None)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("uniform_loss", 0.1),
        ("global_orthogonal_loss", 0.1),
        ("koleo_loss", 10),
        ("variance_loss", 0.1),
        ("covariance_loss", 1e-3),
        ("sigreg_loss", 0.1),
        ("visreg_loss", 10),
    ],
)
def test_gradient_near_collapse_is_as_documented(name: str, factor: float) -> None:
    """The part that spreads rows, when they come ten times closer."""
    noise, base = inputs(("tokens", "pairs"), torch.float64)
    norms = []
    for spread in (1e-3, 1e-4):
        x = (base.detach()[0] + spread * noise.detach()).requires_grad_()
        value_of(LOSSES[name], x).backward()
        norms.append(float((x.grad - x.grad.mean(0)).norm()))
    assert norms[1] / norms[0] == pytest.approx(factor, rel=0.15)
