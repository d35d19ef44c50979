"""Which cure to try, and where."""

from uncollapse.diagnosis import Advice, Kind


def advice(kind: Kind, onset: str, family: str, places: tuple[str, ...], causal: bool) -> tuple[Advice, ...]:
    """Cures to try for a collapse that begins at a layer, the likeliest first."""
    if family == "embeddings":
        return (Advice("uniform_loss", "training", "spreads embeddings", "loss = loss + uc.uniform_loss(x)"),)
    if family == "activations":
        return (Advice("contra_norm", "block", f"in each block up to {onset}", "x = uc.contra_norm(x, scale=0.1)"),)
    if family == "pyg":
        where = f"after each convolution from {onset} on, neighbours left out"
        return (
            Advice("contra_norm", "conv.output", where, 'uc.attach(model, "contra_norm", scale=1.0, preset="gnn")'),
            Advice("pair_norm", "conv.output", "keeps the total distance of nodes", 'uc.attach(model, "pair_norm")'),
        )
    place = "attention.residual" if "attention.residual" in places else "block"
    named = ", modules=[…]" if family == "named" else ""
    first = Advice(
        "contra_norm",
        place,
        f"in each block up to {onset}",
        f'uc.attach(model, "contra_norm", scale=0.1{_layers(onset)}{named})',
    )
    if causal:
        return (first,)
    if kind == "complete" and family in ("huggingface", "timm"):
        lifted = "lifts what attention averages away"
        return first, Advice("attn_scale", "attention.context", lifted, 'uc.attach(model, "attn_scale")')
    dual = f'uc.attach(model, "contra_norm", scale=0.1, axis="features"{named})'
    return first, Advice("contra_norm", place, "its dual over features, made for few dimensions", dual)


def _layers(onset: str) -> str:
    """The argument that chooses the blocks up to one."""
    number = onset.removeprefix("block ")
    return f', layers="first {int(number) + 1}"' if number.isdigit() else ""
