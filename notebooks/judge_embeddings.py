# %% [markdown]
# # Evaluate your embeddings
#
# You have embeddings from two or three models, and no labels. Which ones are good? The number that most people look at
# is how close the embeddings of things that belong together are. The question:
#
# > Pairs are closest in embedding C. Is it the best one?
#
# You need a clone and `pip install -c constraints.txt -e '.[data,report]'`. The data is scikit-learn's handwritten
# digits, which come with that library. The notebook takes a few seconds on one core.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

import uncollapse as uc

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16  # 1797 of 8 × 8
labels = torch.tensor(digits.target)  # only to check the answer at the end

# %% [markdown]
# ## Pairs
#
# A pair is what your application calls *the same*: a query and its answer, two photographs of one thing. Here it is an
# image and the same image with some noise, as from another scanner.

# %%
noise = 0.15 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
others = (images + noise).clamp(0, 1)

# %% [markdown]
# ## Three embeddings
#
# A takes the pixels as they are, B subtracts the mean first, and C is A with a large number added to each entry: a bias
# that somebody forgot. This happens, and no error reports it.

# %%
mean = images.flatten(1).mean(0)
embeddings = {
    "A: pixels": lambda x: x.flatten(1),
    "B: centered": lambda x: x.flatten(1) - mean,
    "C: with a bias": lambda x: x.flatten(1) + 3.0,
}

# %% [markdown]
# ## Two numbers
#
# **Alignment** is the mean squared distance of pairs, from 0 to 4. **Uniformity** says how evenly all vectors are
# spread over the sphere: 0 is a single point, and the gap is the distance to the optimum in percent. Both have
# intervals, so you know whether 300 pairs are enough.

# %%
found = {}
for name, embed in embeddings.items():
    first, second = embed(images)[::6], embed(others)[::6]  # 300 pairs
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
    unit = torch.nn.functional.normalize(embed(images[::6]), dim=1)
    right.hist((unit @ unit.T).flatten().numpy(), bins=60, range=(-1, 1), histtype="step", label=name)
right.set(xlabel="cosine of two images, any two", yticks=[], title="in C all are alike")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## The verdict
#
# C has the closest pairs because everything in it is close to everything else. `diagnose_rows` reads a stream of any
# length and finds this. On the command line it is `uncollapse embeddings c.npy`; this cell writes the file.

# %%
diagnoses = {name: uc.diagnose_rows(embed(images), labels=uc.Labels(model=name)) for name, embed in embeddings.items()}
for name, d in diagnoses.items():
    print(f"{name:16} {d.verdict.sentence}")
np.save("c.npy", embeddings["C: with a bias"](images).numpy())


# %% [markdown]
# ## The answer
#
# No. C has the best alignment and is the worst: its vectors are nearly one point. B has the most distant pairs and is
# the most uniform. Read alignment next to uniformity, never alone. Since there are labels here, we can check how often
# the nearest image shows the same digit if vectors are stored with 8 bits per number, as in many search indexes.


# %%
def nearest_is_same(x):
    """How often the nearest other vector has the same label."""
    unit = torch.nn.functional.normalize(x, dim=1)
    coarse = (unit * 127).round() / 127
    cosines = coarse @ coarse.T
    cosines.fill_diagonal_(-2)
    return float((labels[cosines.argmax(1)] == labels).float().mean())


accuracy = {name: nearest_is_same(embed(images)) for name, embed in embeddings.items()}
print({name: f"{share:.1%}" for name, share in accuracy.items()})
a, b, c = embeddings
assert found[c][0].high < found[a][0].low < found[b][0].low  # C has the closest pairs
assert found[b][1].high < found[a][1].low < found[c][1].low  # and is the least even
assert diagnoses[c].verdict.collapsed
assert not diagnoses[b].verdict.collapsed
assert accuracy[c] < accuracy[b]
