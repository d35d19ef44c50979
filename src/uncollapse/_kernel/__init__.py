"""The arithmetic under `pairwise`: all pairs, tile by tile, forward and backward.

For queries q, keys k, values v and log-weights b (one a key, −inf = the key is absent)

    S_ij = q_i·k_j/τ + b_j      L_i = log Σ_j exp S_ij      P_ij = exp(S_ij − L_i)      o_i = Σ_j P_ij v_j

with gradients, for incoming dO and dL,

    G_ij = P_ij (dO_i·(v_j − o_i) + dL_i)     dq = G k/τ     dk = Gᵀ q/τ     dv = Pᵀ dO     db_j = Σ_i G_ij

Two walks over the pairs compute this. `rows` takes every tile; it handles everything. `symmetric` is for q = k beyond
one tile, on the CPU: it visits only the tiles on and above the diagonal, and each serves both directions, which saves
much of the work. `both_ways` gives the log-sum-exps of rows and of columns, from tiles that serve both. All need a few
megabytes beside their inputs and outputs.

Decisions that the formulas do not show:

- Powers of two: torch's `exp2` is faster than `exp` on CPUs and as exact; log₂e is folded into the product.
- Absent pairs get a very low but finite logit, so that no −inf − −inf appears; rows with nothing left are found by
  their log-sum-exp afterwards, in linear time.
- G cancels where one key outweighs all others of its row (o_i ≈ v_j). But Σ_j G_ij = dL_i, so the entry of such a
  ruling key is dL_i minus the others, which do not cancel: exact zeros stay zero, small gradients keep their digits.
- The batch is walked in chunks, and tiles live in memory that is kept: at a few hundred tokens, fresh memory costs as
  much as the arithmetic.
"""
