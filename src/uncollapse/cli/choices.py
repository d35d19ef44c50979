"""Names that the command line shows in its help and completes; they are here so that it needs no torch for that."""

from typing import Literal

Layout = Literal["auto", "tokens", "sequence_first", "nodes", "vectors", "channels_first"]
DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")
DEVICES = ("auto", "cpu", "cuda", "mps")
GRAPHS = {"karate": "Zachary's karate club", "cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
PLACES = {
    "block": "the residual stream after a block",
    "attention.input": "what enters the block",
    "attention.context": "the heads, before the output projection of attention",
    "attention.output": "what attention adds to the residual",
    "attention.residual": "the residual stream after attention",
    "attention.norm": "what leaves the norm of attention",
    "attention.norm.input": "what the norm in front of attention sees",
    "mlp.output": "what the MLP adds to the residual",
    "mlp.residual": "the residual stream after the MLP",
    "mlp.norm": "what leaves the norm of the MLP",
    "mlp.norm.input": "what the norm in front of the MLP sees",
    "cross.output": "what cross-attention adds to the residual",
    "cross.residual": "the residual stream after cross-attention",
    "cross.norm": "what leaves the norm of cross-attention",
    "cross.norm.input": "what the norm in front of cross-attention sees",
    "conv.output": "after a graph convolution, before norm and activation",
}
