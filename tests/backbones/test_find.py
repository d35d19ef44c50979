"""Which backbone knows a model, which part is meant, what is said of unknown ones, and what is imported for that."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from uncollapse import backbones
from uncollapse.backbones.sites import Context

LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}


def encoder(depth: int = 2) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), depth)


class Unknown(nn.Module):
    """Nothing in here is known, and no list holds blocks: a block has parts."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.stages = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])


def test_unknown_models_are_told_how_to_name_their_blocks() -> None:
    with pytest.raises(ValueError, match="known model") as caught:
        backbones.find(Unknown())
    said = str(caught.value)
    assert "3 × Linear in trunk.stages" in said
    assert "2 × Linear in heads" in said
    assert "modules=['trunk.stages.*']" in said
    assert "--modules 'trunk.stages.*'" in said
    assert backbones.find(Unknown(), modules=["trunk.stages.*"]).blocks[0].name == "trunk.stages.0"


def test_models_without_any_series_list_their_parts() -> None:
    with pytest.raises(ValueError, match=r"Linear.*Tanh"):
        backbones.find(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))


def test_several_stacks() -> None:
    model = nn.ModuleDict({"left": encoder(2), "right": nn.ModuleDict({"deep": encoder(4)})})
    with pytest.raises(ValueError, match="several stacks") as caught:
        backbones.find(model)
    assert "part='left' (TransformerEncoder, 2 blocks), part='right.deep' (TransformerEncoder, 4 blocks)" in str(
        caught.value
    )
    assert len(backbones.find(model, part="left").blocks) == 2
    assert backbones.find(model, part="right").path == "right.deep"
    assert backbones.find(model, part="right.deep.layers").path == "right.deep"
    for wrong in ("middle", "lef", "right.de"):
        with pytest.raises(ValueError, match=rf"part .{wrong}.*part=.left."):
            backbones.find(model, part=wrong)
    with pytest.raises(ValueError, match=r"part .trunk.*Series"):
        backbones.find(Unknown(), part="trunk")


def test_the_model_itself_is_a_part() -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(**LAYER) for _ in range(2)))
    model.add_module("other", encoder(3))
    with pytest.raises(ValueError, match=r"other.*Sequential"):
        backbones.find(model)
    assert len(backbones.find(model, part="").blocks) == 2


def test_one_encoder_under_two_names() -> None:
    model = nn.Module()
    model.one = model.two = encoder()
    assert backbones.find(model).path == "one"


def test_timm_inside_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("timm")
    args = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=args, num_labels=2)
    stack = backbones.find(transformers.TimmWrapperModel(config))
    assert (stack.family, stack.path, len(stack.blocks)) == ("timm", "timm_model", 2)


def test_blocks_that_two_backbones_know_are_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    again = backbones.Backbone("torch", "torch", "the same once more")
    monkeypatch.setitem(backbones.BACKBONES, "again", again)
    assert backbones.find(encoder()).path == ""


@pytest.mark.parametrize("name", backbones.BACKBONES)
def test_every_backbone_can_be_asked_about_any_model(name: str) -> None:
    pytest.importorskip(backbones.BACKBONES[name].library)
    assert backbones.BACKBONES[name].stacks(Unknown()) == ()


def test_contexts_fill_each_other() -> None:
    mask, edges, batch = torch.ones(1, 2).bool(), torch.zeros(2, 0), torch.zeros(2)
    first = Context(edge_index=edges, prefix=1)
    filled = first.fill_from(Context(mask=mask, edge_index=edges + 1, batch=batch, prefix=3, causal=True))
    assert (filled.mask is mask, filled.edge_index is edges, filled.batch is batch) == (True, True, True)
    assert (filled.prefix, filled.causal) == (1, True)


def test_libraries_are_imported_only_for_their_models() -> None:
    code = """
import sys
import torch
import uncollapse
from uncollapse import backbones

heavy = {"transformers", "timm", "torch_geometric", "torchvision", "sklearn", "pandas", "plotly"}
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
assert len(backbones.find(torch.nn.TransformerEncoder(layer, 2)).blocks) == 2
assert len(backbones.find(torch.nn.Sequential(torch.nn.Linear(2, 2)), modules=["0"]).blocks) == 1
print(",".join(sorted(heavy & {name.partition(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""
