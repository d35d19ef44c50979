"""Decoders: measures of massive activations and of norms, remarks, long sequences, offloaded weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.diagnosis.layer_measures import massive_activation, token_norm

torchvision_ops.declare()
transformers: Any = pytest.importorskip("transformers")


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    usual = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return transformers.LlamaModel(transformers.LlamaConfig(**(usual | {"intermediate_size": 64} | sizes)))


def sequences() -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1, 0, 2] = 500.0
    mask = torch.arange(9) < torch.tensor([[9], [7], [2]])
    return x, mask


def test_measures_against_a_naive_reference() -> None:
    x, mask = sequences()
    for found, row, real in zip(massive_activation(x, mask), x, mask, strict=True):
        sizes = sorted(abs(float(value)) for value in row[real].flatten())
        assert float(found) == pytest.approx(sizes[-1] / sizes[(len(sizes) - 1) // 2], rel=1e-6)
    for found, row, real in zip(token_norm(x, mask), x, mask, strict=True):
        norms = sorted(float(token.norm()) for token in row[real][1:])
        assert float(found) == pytest.approx(norms[(len(norms) - 1) // 2])


def test_masked_tokens_do_not_count_and_half_precision_is_close() -> None:
    x, mask = sequences()
    spoilt = x.masked_fill(~mask[..., None], 1e6)
    for measure in (massive_activation, token_norm):
        torch.testing.assert_close(measure(spoilt, mask), measure(x, mask))
        torch.testing.assert_close(measure(x.bfloat16(), mask).double(), measure(x, mask).double(), rtol=2e-2, atol=0)
        assert measure(torch.zeros(1, 4, 3), torch.ones(1, 4, dtype=torch.bool)).isfinite().all()
        assert measure(torch.ones(1, 1, 3), torch.ones(1, 1, dtype=torch.bool)).isfinite().all()


def test_only_causal_models_have_them() -> None:
    x = [torch.randn(8, 12, 16)] * 2
    assert "token_norm" in uc.diagnose_activations(x, causal=True).layers[0].measures
    assert "token_norm" not in uc.diagnose_activations(x).layers[0].measures


def test_remarks_on_massive_activations_and_growth() -> None:
    base = torch.randn(8, 40, 32, generator=torch.Generator().manual_seed(0))
    layers = [base * 2.0**number for number in range(6)]
    layers[3] = layers[3].clone()
    layers[3][:, 0, 5] = 1e5
    cautions = " ".join(uc.diagnose_activations(layers, causal=True).verdict.cautions)
    assert "Massive activations from layer 3 on" in cautions
    assert "The norm of tokens grows 32-fold from layer 0 to layer 5" in cautions
    calm = " ".join(uc.diagnose_activations([base] * 5, causal=True).verdict.cautions)
    assert "Massive" not in calm
    assert "grow" not in calm


class LargestTensor(TorchDispatchMode):
    """The number of entries of the largest tensor that an operator returned."""

    entries = 0

    def __torch_dispatch__(self, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
        return output


def test_long_sequences_need_no_matrix_of_all_pairs() -> None:
    n = 4096
    with LargestTensor() as seen:
        uc.diagnose_activations([torch.randn(1, n, 16)] * 2, causal=True)
    assert 16 * n <= seen.entries < n * n / 8


def test_weights_that_are_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    batch = {"input_ids": torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(0))}
    plan = uc.Plan(baseline=0)
    plain = uc.diagnose(llama(), [batch], plan=plan)
    offloaded = accelerate.cpu_offload(llama(), execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in offloaded.parameters()} == {"meta"}
    found = uc.diagnose(offloaded, [batch], plan=plan)
    assert [layer.measures for layer in found.layers] == [layer.measures for layer in plain.layers]


def test_lora_is_measured_and_mended_without_a_leak() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    assert len(uc.diagnose(model, [{"input_ids": ids}], plan=uc.Plan(baseline=0)).layers) == 5
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    with uc.attach(model, "contra_norm", scale=0.1), torch.no_grad():
        first, second = (model(input_ids=each).last_hidden_state[:, :-1] for each in (ids, changed))
    torch.testing.assert_close(first, second)
