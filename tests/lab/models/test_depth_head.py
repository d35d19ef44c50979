"""The head that reads depths from maps."""

import torch

from uncollapse.lab.engine.seeding import seeded
from uncollapse.lab.models.depth_head import DepthHead


def test_any_map_becomes_the_size_of_the_depths() -> None:
    head = DepthHead(5, side=12, width=4)
    for side in (1, 3, 16):
        assert head(torch.randn(2, 5, side, side)).shape == (2, 12, 12)


def test_it_can_tell_places_apart() -> None:
    """A ramp in the features is read back as a ramp."""
    ramp = torch.linspace(-1, 1, 6).expand(6, 6)
    features = torch.stack([ramp, ramp.T])[None] * torch.tensor([1.0, -1.0, 0.5])[:, None, None, None]
    wanted = torch.nn.functional.interpolate(features[:, :1], (12, 12), mode="bilinear")[:, 0]
    with seeded(0):
        head = DepthHead(2, side=12, width=8)
        optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
        losses = []
        for _ in range(60):
            loss = (head(features) - wanted).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
