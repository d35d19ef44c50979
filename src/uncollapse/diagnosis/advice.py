"""Suggest which cure to try, and where."""

from uncollapse.diagnosis.result import Advice, Kind
from uncollapse.diagnosis.verdict import Subject


def suggest(kind: Kind, onset: str, subject: Subject) -> tuple[Advice, ...]:
    """Return cures to try for a collapse that begins at a layer, the most promising first, each with code that runs."""
    match subject.family:
        case "embeddings":
            return (Advice("uniform_loss", "training", "spreads embeddings", "loss = loss + uc.uniform_loss(x)"),)
        case "activations":
            where = f"in each block up to {onset}"
            return (Advice("contra_norm", "block", where, "x = uc.contra_norm(x, scale=0.1)"),)
        case "pyg":
            return _for_graphs(subject)
    return _for_transformers(kind, onset, subject)


def _for_graphs(subject: Subject) -> tuple[Advice, ...]:
    hidden = f', layers="first {subject.blocks - 1}"' if subject.outputs else ""
    contra = f'scale=1.0, preset="gnn"{hidden}'
    return (
        _tip("contra_norm", "conv.output", "after each convolution, leaving out neighbours", contra),
        _tip("pair_norm", "conv.output", "preserves the total distance between nodes", hidden.removeprefix(", ")),
    )


def _for_transformers(kind: Kind, onset: str, subject: Subject) -> tuple[Advice, ...]:
    place = "attention.residual" if "attention.residual" in subject.places else "block"
    named = f", modules={list(subject.modules)!r}" if subject.modules else ""
    blocks = "each block" if onset == "embed" else f"each block up to {onset}"
    first = _tip("contra_norm", place, f"in {blocks}", f"scale=0.1{_layers(onset)}{named}")
    if subject.causal:
        return (first,)
    if kind == "complete" and "attention.context" in subject.places:
        return first, _tip("attn_scale", "attention.context", "amplifies what attention averages away")
    if kind == "complete" and "attention.output" in subject.places:
        return first, _tip("feat_scale", "attention.output", "amplifies what differs from the mean token")
    if kind == "complete":
        return (first,)
    dual = f'scale=0.1, axis="features"{named}'
    return first, _tip("contra_norm", place, "the dual over features, designed for dimensional collapse", dual)


def _tip(cure: str, place: str, reason: str, options: str = "") -> Advice:
    return Advice(cure, place, reason, f'uc.attach(model, "{cure}"{", " if options else ""}{options})')


def _layers(onset: str) -> str:
    """Return the argument that selects the blocks up to and including one."""
    word, _, number = onset.partition(" ")
    return f', layers="first {int(number) + 1}"' if word == "block" and number.isdigit() else ""
