# %% [markdown]
# # Train on the sphere
#
# Contrastive learning makes vectors without labels: two views of one thing shall be close. If that is all that is asked for, there is a cheap way to obey. The question:
#
# > What keeps an encoder from giving the same vector to everything?
#
# We train one on scikit-learn's digits three times, onto a circle, so that we can see what it does. You need `pip install "uncollapse[train,report]"`. It takes some seconds on one core.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import uncollapse as uc

torch.set_num_threads(1)
digits = load_digits()
pictures = torch.tensor(digits.data, dtype=torch.float32) / 16  # 1797 of 64 pixels
labels = torch.tensor(digits.target)  # for the colours and the check only
held, pictures_held, labels_held = slice(0, 300), pictures[:300], labels[:300]

# %% [markdown]
# ## Two losses
#
# `align_loss` is the distance of two views of one picture. `uniform_loss` is low when all vectors lie evenly on the sphere. `info_nce` asks for both in one formula: the own partner shall be closer
# than those of the others.

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
        batch = pictures[300 + torch.randperm(len(pictures) - 300)[:256]]
        u, v = (encoder(view) for view in two_views(batch))
        optimizer.zero_grad()
        loss(u, v).backward()
        optimizer.step()
    return encoder.eval()


encoders = {name: train(loss) for name, loss in losses.items()}

# %% [markdown]
# ## What came of it
#
# Pictures that no encoder has seen, on the circle; a colour is a digit.

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 3.4))
spread, close = {}, {}
for axes, (name, encoder) in zip(panels, encoders.items(), strict=True):
    with torch.no_grad():
        u, v = (nn.functional.normalize(encoder(view), dim=1) for view in two_views(pictures_held))
    spread[name], close[name] = float(uc.uniformity(u)), float(uc.alignment(u, v))
    jitter = 1 + 0.15 * torch.rand(len(u), 1, generator=torch.Generator().manual_seed(0))
    axes.scatter(*(u * jitter).T, c=labels_held, cmap="tab10", s=6)
    axes.set(title=f"{name}\nuniformity {spread[name]:.2f}", xticks=[], yticks=[], xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
    axes.set_aspect("equal")
figure.tight_layout()
plt.show()
print({name: f"{value:.3f}" for name, value in close.items()}, f"optimum of uniformity: {uc.uniformity_optimum(2):.2f}")

# %% [markdown]
# ## Is it of use?
#
# A circle is small for ten digits, yet neighbours on it are often of one kind, where it was filled.


# %%
def neighbours_agree(encoder):
    """How often the nearest of the pictures that it learned from shows the same digit."""
    with torch.no_grad():
        unit = nn.functional.normalize(encoder(pictures), dim=1)
    nearest = (unit[held] @ unit[300:].T).argmax(1)
    return float((labels[300:][nearest] == labels_held).float().mean())


share = {name: neighbours_agree(encoder) for name, encoder in encoders.items()}
print({name: f"{value:.0%}" for name, value in share.items()}, "guessing: 10%")

# %% [markdown]
# ## The answer
#
# Repulsion: something must ask that different things lie apart. With alignment alone the encoder obeys by giving one vector to all, and pairs are perfectly close: collapse. With `uniform_loss`, or the negatives of
# InfoNCE, the circle is filled, and neighbours mean something.

# %%
alone, both, nce = losses
assert close[alone] < 0.01  # what was asked for is fulfilled
assert spread[alone] > -0.1  # 0 is a single point
assert spread[both] < -0.9
assert spread[nce] < -0.9
assert min(share[both], share[nce]) > share[alone] + 0.15

# %% [markdown]
# From here: `uncollapse train contrast --quick` is the same with a real encoder and checkpoints, and `uc.Monitor` watches an encoder of yours for the collapse while it trains.
