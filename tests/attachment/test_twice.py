"""The same cure attached twice, as when a notebook cell runs twice."""

import pytest
import torch

import uncollapse as uc
from uncollapse.registry import CURES

from .tiny_models import build


@pytest.mark.parametrize("cure", [name for name, entry in CURES.items() if entry.acts_on != "edges"])
@pytest.mark.parametrize("name", ["timm_vit", "bert", "gcn"])
@pytest.mark.filterwarnings("ignore:The model has this cure there already")
def test_the_same_cure_twice_comes_out_in_any_order(name: str, cure: str) -> None:
    tiny = build(name)
    plain, options = tiny.output(), {"scale": 0.5} if cure in ("gfsa", "contra_norm") else {}
    try:
        one, two = (uc.attach(tiny.model, cure, **options, **tiny.where) for _ in range(2))
    except ValueError:
        pytest.skip(f"{cure} does not fit {name}")
    tiny.output()
    one.remove()
    with_two = tiny.output()
    two.remove()
    assert torch.equal(tiny.output(), plain)
    alone = uc.attach(tiny.model, cure, **options, **tiny.where)
    for module, other in zip(alone.cures.values(), two.cures.values(), strict=True):
        module.load_state_dict(other.state_dict())
    assert torch.equal(tiny.output(), with_two)
