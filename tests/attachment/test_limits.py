"""What cannot work says so, instead of doing nothing or something else."""

from typing import Any

import pytest
import torch
from torch import nn

import uncollapse as uc

transformers = pytest.importorskip("transformers")


def test_blocks_that_are_run_past_hooks() -> None:
    groups = {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")}
    config = transformers.SqueezeBertConfig(
        vocab_size=40,
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        **groups,
    )
    model = transformers.SqueezeBertModel(config)
    with pytest.raises(ValueError, match=r"no model that is known.* modules=\['encoder.layers.\*'\]"):
        uc.attach(model, "contra_norm", scale=0.5)
    uc.attach(model, "contra_norm", scale=0.5, modules=["encoder.layers.*"])
    with pytest.warns(UserWarning, match=r"None of the modules with a cure ran .*encoder\.layers\.0"):
        model(torch.arange(6)[None])


def test_named_modules_that_never_run() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    with uc.attach(model, "contra_norm", scale=0.5, modules=["self_attn.out_proj"]):
        with pytest.warns(UserWarning, match=r"None of the modules .*self_attn\.out_proj"):
            model(torch.randn(2, 5, 16))
        model(torch.randn(2, 5, 16))  # it is said once
    uc.attach(model, "contra_norm", scale=0.5, modules=["linear1", "self_attn.out_proj"])
    model(torch.randn(2, 5, 16))  # one of them runs


def test_dropped_layers_in_front_of_the_final_norm() -> None:
    """The padding of an earlier pass is not taken for that of this one."""
    config = transformers.OPTConfig(
        vocab_size=40,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        layerdrop=1.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.OPTModel(config).eval()
    uc.attach(model, "contra_norm", scale=0.5, at="final.norm")
    model(torch.arange(6)[None])
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.1 did not run in this pass"):
        model.train()(torch.arange(6)[None])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_learned_scale_begins_in_the_dtype_of_the_model(dtype: Any) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2).to(dtype)
    handle = uc.attach(model, "contra_norm", scale=0.1, learnable=True)
    scales = [next(cure.parameters()) for cure in handle.cures.values()]
    assert all(torch.equal(scale, torch.full((16,), 0.1, dtype=dtype)) for scale in scales)


def test_a_cure_may_have_a_place_of_its_own() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    assert uc.attach(model, "feat_scale").at == ("attention.output",)
    assert uc.attach(model, "contra_norm", scale=0.1).at == ("attention.residual",)


class Loops(nn.Module):
    """Runs whatever it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


def test_a_module_that_loops_over_its_children_does_not_run_the_cure_as_one() -> None:
    torch.manual_seed(0)
    model, x = Loops(), torch.randn(2, 5, 16)
    wrapped = nn.Sequential(model)
    with uc.attach(wrapped, "contra_norm", scale=0.5, modules=["0"]):
        torch.testing.assert_close(wrapped(x), uc.contra_norm(model.second(model.first(x)), 0.5))
