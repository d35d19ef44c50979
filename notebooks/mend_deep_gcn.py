# %% [markdown]
# # Mend a deep graph network
#
# A graph convolution averages each node with its neighbors. Two of them make a good network; after sixteen, all nodes
# are alike. The question:
#
# > Why does my deep GCN learn nothing, and can one line mend it?
#
# You need a clone and `pip install -c constraints.txt -e '.[pyg,report]'`. The graph is random, so nothing is
# downloaded. The notebook takes a few seconds on one core.

# %%
import itertools

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import uncollapse as uc
from uncollapse.lab.data.graph.datasets import csbm

torch.set_num_threads(1)  # more do not help with so small a graph

# %% [markdown]
# ## A graph
#
# 600 nodes of three classes. A node has eight neighbors, of which about 70 % share its class, and its features hint at
# the class too. The classes of 60 nodes are known; the task is to predict the others.

# %%
x, edges, y = csbm(600, 3, seed=0)
graph = Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=y)
known = torch.zeros(600, dtype=torch.bool)
known[torch.randperm(600, generator=torch.Generator().manual_seed(0))[:60]] = True

# %% [markdown]
# ## An ordinary network


# %%
class Net(nn.Module):
    """Graph convolutions with ReLU between."""

    def __init__(self, layers: int):
        super().__init__()
        widths = [32] * layers + [3]
        self.convs = nn.ModuleList(GCNConv(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, data):
        """A graph -> logits (n, 3)."""
        x = data.x
        for conv in self.convs[:-1]:
            x = conv(x, data.edge_index).relu()
        return self.convs[-1](x, data.edge_index)


def train(model, epochs=50):
    """Learn the known nodes; give the accuracy on the others."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(graph)[known], y[known]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(graph).argmax(1) == y)[~known].float().mean())


# %% [markdown]
# ## The failure

# %%
torch.manual_seed(0)
shallow = train(Net(2))
torch.manual_seed(0)
plain = Net(16)
before = uc.diagnose(plain, [graph], plan=uc.Plan(baseline=0), labels=uc.Labels("16 layers"))
deep = train(plain)
print(f"2 layers: {shallow:.0%} right. 16 layers: {deep:.0%}, and guessing gives 33%.")
print(before.verdict.sentence)

# %% [markdown]
# Before a single training step, all nodes are the same after a few layers: **complete collapse**. Later layers and the
# gradient have nothing left to work with.
#
# ## One line
#
# ContraNorm moves nodes apart that resemble each other. `attach` puts it after each hidden convolution, and the code of
# the model stays as it is. `preset="gnn"` is the variant that was published for graphs, and `layers=":-1"` leaves out
# the last convolution, which computes the logits.

# %%
torch.manual_seed(0)
mended = Net(16)
print(uc.attach(mended, "contra_norm", scale=1.0, preset="gnn", layers=":-1"))
after = uc.diagnose(mended, [graph], plan=uc.Plan(baseline=0), labels=uc.Labels("16 layers with ContraNorm"))
cured = train(mended)
print(f"With ContraNorm: {cured:.0%} right.")

# %%
figure, axes = plt.subplots(figsize=(7, 3))
for d, style in ((before, "o-"), (after, "s-")):
    blocks = [layer for layer in d.layers if layer.name.startswith("block")]
    axes.plot([layer["mean_cosine"] for layer in blocks], style, label=f"{d.model}, untrained")
axes.set(xlabel="layer", ylabel="cosine of two nodes", ylim=(-0.1, 1.05), title="1 = all nodes point the same way")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## The answer
#
# It learns nothing because its nodes have collapsed before training begins, and one line fixes that. Two layers are
# still the better choice on this graph: depth that is not needed has a cost.

# %%
assert before.verdict.kind in ("complete", "both")
assert deep < 0.5 < cured
assert cured > deep + 0.25

# %% [markdown]
# Next: save `mended` like any model, or only the cure with `uc.save_cure(mended, "cure")`. `uncollapse train gcn-depth`
# runs the experiment on citation graphs, with the paper's numbers next to it.
