"""What recipes say of tuning: all that they vary can be had, and the lines to copy run."""

import dataclasses
from typing import Any

import pytest
import torch

import uncollapse as uc
from uncollapse.lab.config import fields
from uncollapse.lab.experiments.gcn import recipe as gcn_depth
from uncollapse.lab.experiments.gcn.config import Config
from uncollapse.lab.experiments.glue import recipe as glue
from uncollapse.lab.experiments.vit import recipe as vit
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.search.variables import build_search
from uncollapse.tuning.space import Between

TUNED = [name for name in RECIPES if RECIPES[name].search is not None]


@pytest.mark.parametrize("name", TUNED)
def test_the_space_can_be_had(name: str) -> None:
    recipe = RECIPES[name]
    search = recipe.search
    assert search is not None
    config = recipe.config(holdout=0.1) if "holdout" in fields.config_fields(recipe.config) else recipe.config()
    made = build_search(search, config, ())
    assert made.baseline == dataclasses.replace(config, **search.baseline)
    for dimension in made.space:
        values = (dimension.low, dimension.high) if isinstance(dimension, Between) else dimension.values
        for value in values:
            checked = fields.parse_values(recipe.config, {dimension.field: value})
            assert dataclasses.replace(config, **checked)


def test_lines_for_graphs() -> None:
    models: Any = pytest.importorskip("torch_geometric.nn.models")
    for norm in ("contra_norm", "contra_norm_features", "pair_norm"):
        line = gcn_depth.attach_code(Config(layers=4, norm=norm, scale=0.5))
        assert line is not None
        model = models.GCN(8, 16, num_layers=4, out_channels=3)
        handle = eval(line, {"uc": uc, "model": model})
        assert handle.blocks == (0, 1, 2)
        assert model(torch.randn(5, 8), torch.tensor([[0, 1], [1, 2]])).isfinite().all()
    assert gcn_depth.attach_code(Config(norm="batch_norm")) is None


def test_lines_for_text() -> None:
    config = glue.Config(scale=0.2, at="block", layers=":2", temperature=0.5, axis="features")
    line = glue.RECIPE.search.line(config)
    assert line == (
        'uc.attach(model, "contra_norm", scale=0.2, at="block", layers=":2", temperature=0.5, axis="features", '
        "identity=True)"
    )
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    assert eval(line, {"uc": uc, "model": model}).blocks == (0, 1)
    assert "contra_uniform_loss" in str(glue.RECIPE.search.line(glue.Config(cure="uniform_loss")))


def test_lines_for_pictures() -> None:
    assert vit.attach_code(vit.Config(scale=0.3)) == 'uc.attach(model, "contra_norm", at="norms", scale=0.3)'
    assert vit.attach_code(vit.Config(cure="attn_scale")) == 'uc.attach(model, "attn_scale")'


def test_blocks_of_a_text_encoder() -> None:
    """The setting `layers` goes to `attach`, and is idle without ContraNorm."""
    assert glue.Config(cure="none", layers="first 2") == glue.Config(cure="none")
    assert fields.command_line("glue", glue.Config(layers=":4")) == "uncollapse train glue --layers :4"
