"""The tables of the page on the kernel: every compiled kernel, and times that follow from the arithmetic."""

import pytest
from website.pages import kernel
from website.pages.results import RESULTS

pytestmark = pytest.mark.skipif(not (RESULTS / "triton_compiled.json").exists(), reason="nothing was compiled")


def test_every_kernel_is_listed_and_none_spills() -> None:
    head, rows = kernel.compiled()
    assert head[3:6] == tuple(f"{t}: registers, shared memory" for t in ("sm_80", "sm_90", "gfx942"))
    assert {row[0] for row in rows} == {*kernel.WORK, "columns"}
    assert {row[-1] for row in rows} == {"0 bytes"}


def test_products_of_a_float32_mean_at_the_peak_of_an_a100() -> None:
    """19,712 rows fill 308 tiles of 64 in each direction: two products of 128 features for each pair."""
    gpu = kernel.GPUS["A100"]
    parts = kernel.kernel_time(gpu, kernel.MEAN, 1, 19_712, 128, "float32")
    least = 2 * 19_712**2 * 256 / 19.5e12
    assert least <= parts["products"] <= 2 * least  # the last programs leave some multiprocessors idle
    assert parts["exponentials"] < parts["cache"] < parts["products"]


def test_times_are_marked_as_computed_and_fall_with_faster_gpus() -> None:
    head, rows = kernel.expected()
    assert head[2:4] == ("A100, computed", "H100, computed")
    for row in rows:
        a100, h100 = (float(cell.removesuffix(" ms")) for cell in row[2:4])
        assert 0 < h100 < a100
