# %% [markdown]
# # Evaluate your embeddings
#
# You have vectors of things, from two or three models, and no labels. Which vectors are good? One number that everybody takes is how close the vectors of things are that
# belong together. The question:
#
# > Pairs are closest in embedding C. Is it the best one?
#
# You need `pip install "uncollapse[data,report]"`. The things are scikit-learn's handwritten digits, which come with the library. It takes some seconds on one core.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

import uncollapse as uc

digits = load_digits()
pictures = torch.tensor(digits.images, dtype=torch.float32) / 16  # 1797 of 8 × 8
labels = torch.tensor(digits.target)  # only to check the answer at the end

# %% [markdown]
# ## Pairs
#
# A pair is what your application calls *the same*: a query and its answer, two photographs of one thing. Here it is a picture and the same one with some noise, as from another scanner.

# %%
noise = 0.15 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
others = (pictures + noise).clamp(0, 1)

# %% [markdown]
# ## Three embeddings
#
# A takes the pixels as they are, B takes the mean away first, and C is A with a large number added to each entry: a bias that somebody forgot. It happens, and no error tells you.

# %%
mean = pictures.flatten(1).mean(0)
embeddings = {
    "A: pixels": lambda x: x.flatten(1),
    "B: centred": lambda x: x.flatten(1) - mean,
    "C: with a bias": lambda x: x.flatten(1) + 3.0,
}

# %% [markdown]
# ## Two numbers
#
# **Alignment** is how far pairs are apart, from 0 to 4. **Uniformity** is how evenly all vectors lie on the sphere: 0 is a single point, and the gap says how far it is from the
# optimum, in percent. Both have intervals, so that you know whether 300 pairs were enough.

# %%
found = {}
for name, embed in embeddings.items():
    first, second = embed(pictures)[::6], embed(others)[::6]  # 300 pairs
    close = uc.alignment_interval(first, second)
    even = uc.uniformity_interval(first)
    gap = uc.uniformity_gap(even.value, d=64)
    found[name] = (close, even, gap)
    print(f"{name:16} alignment {close.value:.3f} ({close.low:.3f} to {close.high:.3f}), ", end="")
    print(f"uniformity {even.value:.2f} ({even.low:.2f} to {even.high:.2f}), {gap:.0f} % from the optimum")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for name, (close, even, _) in found.items():
    left.errorbar(
        close.value, even.value, yerr=[[even.value - even.low], [even.high - even.value]], fmt="o", label=name
    )
left.axhline(uc.uniformity_optimum(64), color="grey", linestyle=":")
left.set(xlabel="alignment: pairs apart", ylabel="uniformity", title="good is left and below")
left.legend()
for name, embed in embeddings.items():
    unit = torch.nn.functional.normalize(embed(pictures[::6]), dim=1)
    right.hist((unit @ unit.T).flatten().numpy(), bins=60, range=(-1, 1), histtype="step", label=name)
right.set(xlabel="cosine of two pictures, any two", yticks=[], title="in C all are alike")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## The verdict
#
# C has the closest pairs, because everything in it is close to everything. `diagnose_rows` reads a stream of any length and names that; on the command line it is
# `uncollapse embeddings c.npy`.

# %%
diagnoses = {
    name: uc.diagnose_rows(embed(pictures).split(500), labels=uc.Labels(model=name))
    for name, embed in embeddings.items()
}
for name, d in diagnoses.items():
    print(f"{name:16} {d.verdict.sentence}")
np.save("c.npy", embeddings["C: with a bias"](pictures).numpy())


# %% [markdown]
# ## The answer
#
# No. C has the best alignment and is the worst: its vectors are nearly one point. B has the widest pairs and lies most evenly. Read alignment beside uniformity, never alone. Since we do have labels here, we can
# check with them how often the nearest picture shows the same digit, when vectors are kept as an index keeps them, in 8 bits a number.


# %%
def nearest_is_same(x):
    """How often the nearest other vector has the same label."""
    unit = torch.nn.functional.normalize(x, dim=1)
    coarse = (unit * 127).round() / 127
    cosines = coarse @ coarse.T
    cosines.fill_diagonal_(-2)
    return float((labels[cosines.argmax(1)] == labels).float().mean())


right_ones = {name: nearest_is_same(embed(pictures)) for name, embed in embeddings.items()}
print({name: f"{share:.1%}" for name, share in right_ones.items()})
a, b, c = embeddings
assert found[c][0].high < found[a][0].low < found[b][0].low  # C has the closest pairs
assert found[b][1].high < found[a][1].low < found[c][1].low  # and is the least even
assert diagnoses[c].verdict.collapsed
assert not diagnoses[b].verdict.collapsed
assert right_ones[c] < right_ones[b]
