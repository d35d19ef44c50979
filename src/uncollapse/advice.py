"""Which cure to try, and where."""

from uncollapse.diagnosis import Advice, Kind


def advice(kind: Kind, onset: str, family: str, places: tuple[str, ...], causal: bool) -> tuple[Advice, ...]:
    """Cures to try for a collapse that begins at a layer, the likeliest first."""
    if family == "embeddings":
        return (Advice("uniform_loss", "training", "spreads embeddings", "loss = loss + uc.uniform_loss(x)"),)
    if family == "pyg":
        contra = "x = uc.contra_norm(x, scale=1.0, edge_index=edge_index)"
        return (
            Advice(
                "contra_norm", "conv.output", f"after each convolution from {onset} on, neighbours left out", contra
            ),
            Advice("pair_norm", "conv.output", "cheaper; keeps the total distance of nodes", "x = uc.pair_norm(x)"),
        )
    place = "attention.residual" if "attention.residual" in places else "block"
    order = ", causal=True" if causal else ""
    first = Advice("contra_norm", place, f"in each block up to {onset}", f"x = uc.contra_norm(x, scale=0.1{order})")
    if causal:
        return (first,)
    if kind == "complete":
        return first, Advice("attn_scale", "attention", "lifts what attention averages away", "uc.AttnScale(heads)")
    dual = 'x = uc.contra_norm(x, scale=0.1, axis="features")'
    return first, Advice("contra_norm", place, "its dual over features, made for few dimensions", dual)
