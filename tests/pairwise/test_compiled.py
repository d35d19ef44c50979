"""The Triton kernels compile for GPUs that are not there, without spilling registers, within their shared memory."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import compiled

KERNELS = {
    "mean and log-sum-exp": "softmax_rows",
    "log-sum-exps both ways": "both_sums",
    "gradient both ways": "pull, both ways",
}
STORED = Path(__file__).parents[2] / "results" / "triton_compiled.json"


@pytest.mark.parametrize("target", compiled.TARGETS)
def test_compiles_without_spilling(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest sums in registers, with all kernels; and sums in memory, exact ones, with the largest kernel."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    largest = ("gradient of keys and values",)
    rows = list(compiled.table([(torch.bfloat16, 128, "all")], [target]))
    rows += compiled.table([(torch.float16, 384, "all"), (torch.float32, 768, "all")], [target], largest)
    assert len({row["kernel"] for row in rows}) == 6
    for row in rows:
        assert row["spilled"] == 0, row
        assert 0 < row["shared"] <= row["shared_limit"], row
        assert row["registers"] > 0, row


def test_stored_table_has_every_kernel_and_no_spills() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))["kernels"]
    assert len(stored) == len(compiled.CONFIGURATIONS) * len(compiled.TARGETS) * 6
    assert [row for row in stored if row["spilled"] or row["shared"] > row["shared_limit"]] == []
    for row in stored:  # as the kernels are launched today
        dtype, amd = getattr(torch, row["dtype"]), row["target"] == "gfx942"
        kernel = KERNELS.get(row["kernel"], "pull")
        assert row["blocks"] == compiled.fused.blocks(kernel, dtype, row["width"], amd)._asdict(), "run it again"


def test_a_spill_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp cannot hold the sums of 64 rows in its registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = compiled.launches(torch.bfloat16, 128, "none", amd=False)["mean and log-sum-exp"]
    one_warp = launch._replace(size=launch.size._replace(warps=1))
    assert compiled.compile_launch(one_warp, "sm_80").spilled > 0
