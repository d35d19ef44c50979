"""Rendered rooms: their depths are what geometry says, and they are the same everywhere."""

import pytest
import torch

from uncollapse.lab.data.image import depth_maps
from uncollapse.lab.data.image.depth_maps import EYE, FIELD, WALL, render_scenes


def test_shapes_and_kinds() -> None:
    scenes = render_scenes(3, 20, 10)
    assert scenes.images.shape == (3, 3, 20, 20)
    assert scenes.images.dtype == torch.uint8
    assert scenes.depths.shape == (3, 10, 10)
    assert bool(scenes.depths.isfinite().all())
    assert 1 < float(scenes.depths.min()) < float(scenes.depths.max()) <= WALL[1]


def test_the_same_scenes_whatever_was_drawn_before() -> None:
    first = render_scenes(4, 16, 16)
    torch.rand(3)
    again = render_scenes(2, 16, 16)
    assert torch.equal(first.images[:2], again.images)
    assert torch.equal(first.depths[:2], again.depths)
    assert not torch.equal(first.images[0], first.images[1])


def test_floor_and_wall_without_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_maps, "_box", lambda rays, low, high: torch.full(rays.shape[1:], torch.inf))
    depth = render_scenes(1, 64, 64).depths[0]
    wall = float(depth[0, 0])
    assert WALL[0] <= wall <= WALL[1]
    for row in range(64):
        down = FIELD * ((2 * row + 1) / 64 - 1)
        expected = min(wall, EYE / down) if down > 0 else wall  # a floor at this height is so far away
        torch.testing.assert_close(depth[row], torch.full((64,), expected), rtol=1e-5, atol=1e-5)


def test_a_box_by_hand() -> None:
    rays = torch.tensor([[[0.0, 1.0]], [[0.0, 0.0]], [[1.0, 1.0]]])  # ahead, and half right
    low, high = torch.tensor([-0.5, -0.5, 2.0]), torch.tensor([0.5, 0.5, 3.0])
    assert depth_maps._box(rays + 1e-9, low, high).tolist() == [[pytest.approx(2.0), float("inf")]]
