"""Which cure to try, and where."""

from uncollapse.diagnosis.case import Subject
from uncollapse.diagnosis.result import Advice, Kind


def advice(kind: Kind, onset: str, subject: Subject) -> tuple[Advice, ...]:
    """Cures to try for a collapse that begins at a layer, the likeliest first; each with a line of code that runs."""
    match subject.family:
        case "embeddings":
            return (Advice("uniform_loss", "training", "spreads embeddings", "loss = loss + uc.uniform_loss(x)"),)
        case "activations":
            where = f"in each block up to {onset}"
            return (Advice("contra_norm", "block", where, "x = uc.contra_norm(x, scale=0.1)"),)
        case "pyg":
            hidden = f', layers="first {subject.hidden}"' if subject.outputs else ""
            contra = f'scale=1.0, preset="gnn"{hidden}'
            return (
                _tip("contra_norm", "conv.output", "after each convolution, neighbours left out", contra),
                _tip("pair_norm", "conv.output", "keeps the total distance of nodes", hidden.removeprefix(", ")),
            )
    place = "attention.residual" if "attention.residual" in subject.places else "block"
    named = f", modules={list(subject.modules)!r}" if subject.modules else ""
    first = _tip("contra_norm", place, f"in {_up_to(onset)}", f"scale=0.1{_layers(onset)}{named}")
    if subject.causal:
        return (first,)
    if kind == "complete" and "attention.context" in subject.places:
        return first, _tip("attn_scale", "attention.context", "lifts what attention averages away")
    if kind == "complete" and "attention.output" in subject.places:
        return first, _tip("feat_scale", "attention.output", "lifts what differs from the mean token")
    if kind == "complete":
        return (first,)
    dual = f'scale=0.1, axis="features"{named}'
    return first, _tip("contra_norm", place, "its dual over features, made for few dimensions", dual)


def _tip(cure: str, place: str, reason: str, options: str = "") -> Advice:
    return Advice(cure, place, reason, f'uc.attach(model, "{cure}"{", " if options else ""}{options})')


def _up_to(onset: str) -> str:
    return "each block" if onset == "embed" else f"each block up to {onset}"


def _layers(onset: str) -> str:
    """The argument that chooses the blocks up to one."""
    word, _, number = onset.partition(" ")
    return f', layers="first {int(number) + 1}"' if word == "block" and number.isdigit() else ""
