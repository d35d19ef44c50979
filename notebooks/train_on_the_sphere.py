# %% [markdown]
# # Train on the sphere
#
# Contrastive learning makes embeddings without labels: two views of one thing are pulled together. If that is all that
# the loss asks for, there is a cheap solution. The question:
#
# > What keeps an encoder from giving the same vector to everything?
#
# We train one on scikit-learn's digits three times, with two outputs on a circle, so that we can see what it does. You
# need a clone and `pip install -c constraints.txt -e '.[train,report]'`. The notebook takes a few seconds on one core.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import uncollapse as uc

torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16  # 1797 of 64 pixels
labels = torch.tensor(digits.target)  # for the colors and the check only
held, images_held, labels_held = slice(0, 300), images[:300], labels[:300]

# %% [markdown]
# ## Two losses
#
# `align_loss` is the mean squared distance of two views of one image. `uniform_loss` is low when all vectors are spread
# evenly over the sphere. `info_nce` combines both: the partner of a vector should be closer than all other vectors.

# %%
losses = {
    "alignment alone": lambda u, v: uc.align_loss(u, v),
    "alignment and uniformity": lambda u, v: uc.align_loss(u, v) + uc.uniform_loss(u, y=v),
    "InfoNCE": lambda u, v: uc.info_nce(u, v, temperature=0.2),
}


def two_views(x):
    """Noise, and some pixels that are missing, drawn anew for each."""
    return tuple((x + 0.1 * torch.randn_like(x)) * (torch.rand_like(x) > 0.1) for _ in range(2))


def train(loss, steps=250):
    """An encoder onto the circle, and how the loss went."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = images[300 + torch.randperm(len(images) - 300)[:256]]
        u, v = (encoder(view) for view in two_views(batch))
        optimizer.zero_grad()
        loss(u, v).backward()
        optimizer.step()
    return encoder.eval()


encoders = {name: train(loss) for name, loss in losses.items()}

# %% [markdown]
# ## The result
#
# Images that no encoder has seen, on the circle. Colors are digits.

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 3.4))
spread, close = {}, {}
for axes, (name, encoder) in zip(panels, encoders.items(), strict=True):
    with torch.no_grad():
        u, v = (nn.functional.normalize(encoder(view), dim=1) for view in two_views(images_held))
    spread[name], close[name] = float(uc.uniformity(u)), float(uc.alignment(u, v))
    jitter = 1 + 0.15 * torch.rand(len(u), 1, generator=torch.Generator().manual_seed(0))
    axes.scatter(*(u * jitter).T, c=labels_held, cmap="tab10", s=6)
    axes.set(title=f"{name}\nuniformity {spread[name]:.2f}", xticks=[], yticks=[], xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
    axes.set_aspect("equal")
figure.tight_layout()
plt.show()
print({name: f"{value:.3f}" for name, value in close.items()}, f"optimum of uniformity: {uc.uniformity_optimum(2):.2f}")

# %% [markdown]
# ## Is it useful?
#
# A circle has little room for ten digits. Where it is filled, neighbors still often show the same digit.


# %%
def neighbors_agree(encoder):
    """Return how often the nearest training image shows the same digit."""
    with torch.no_grad():
        unit = nn.functional.normalize(encoder(images), dim=1)
    nearest = (unit[held] @ unit[300:].T).argmax(1)
    return float((labels[300:][nearest] == labels_held).float().mean())


share = {name: neighbors_agree(encoder) for name, encoder in encoders.items()}
print({name: f"{value:.0%}" for name, value in share.items()}, "guessing: 10%")

# %% [markdown]
# ## The answer
#
# Repulsion: the loss has to push different things apart. With alignment alone, the encoder gives one vector to
# everything, and pairs are perfectly close: collapse. With `uniform_loss`, or with the negatives of InfoNCE, the circle
# is filled, and neighbors are meaningful.

# %%
alone, both, nce = losses
assert close[alone] < 0.01  # what was asked for is fulfilled
assert spread[alone] > -0.1  # 0 is a single point
assert spread[both] < -0.9
assert spread[nce] < -0.9
assert min(share[both], share[nce]) > share[alone] + 0.15

# %% [markdown]
# Next: `uncollapse train contrast --quick` does the same with a convolutional encoder and checkpoints, and `uc.Monitor`
# watches your own encoder for collapse while it trains.
