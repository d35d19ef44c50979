"""Read models by name and data by file. Each library is imported only when it is needed.

What the command line lists without torch stands here.
"""

DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")
GRAPHS = {"karate": "Zachary's karate club", "cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
