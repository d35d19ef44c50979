"""Suggest which cure to try, and where: by what was measured on such models, or by the papers where nothing was."""

from dataclasses import replace

from uncollapse.diagnosis.reference_data import PAGE, Gain, Measured, embedding_outlook, find_measured
from uncollapse.diagnosis.result import Advice, Cause, Kind
from uncollapse.diagnosis.verdict import Subject

SHOWN = 2  # measured rows


def suggest(kind: Kind, onset: str, subject: Subject) -> tuple[Advice, ...]:
    """Return cures to try for a collapse that begins at a layer, the most promising first, each with code that runs."""
    match subject.family:
        case "embeddings":
            spread = Advice("uniform_loss", "training", "spreads embeddings", "loss = loss + uc.uniform_loss(x)")
            return (spread,) if kind == "dimensional" else (_without_common_directions(), spread)
        case "activations":
            where = f"in each block up to {onset}"
            return (Advice("contra_norm", "block", where, "x = uc.contra_norm(x, scale=0.1)"),)
    measured = find_measured(kind_of_model(subject), subject.blocks, kind)
    return _from_papers(kind, onset, subject) if measured is None else from_measured(measured, kind)


def _without_common_directions() -> Advice:
    """Return how stored rows are mended without training, with how often that has helped."""
    words = "removes the directions that all rows share, without training; for rows that are compared by cosine"
    counts = embedding_outlook(acts=True)
    code = "uc.EmbeddingTransform().fit_transform(x)"
    return Advice("all_but_the_top", "embeddings", f"{words}{f'; {counts}' if counts else ''}", code)


def kind_of_model(subject: Subject) -> str:
    """Return the kind of model in the words of the measured gains; empty if it is none of them."""
    if subject.family == "pyg":
        return "graph network"
    if "attention.norm" not in subject.places or subject.modules:
        return ""
    norm = "pre-norm" if "attention.norm.input" in subject.places else "post-norm"
    return f"{norm} {'decoder' if subject.causal else 'encoder'}"


def from_measured(measured: Measured, kind: Kind) -> tuple[Advice, ...]:
    """Return the best measured rows, at least one of which can be attached if any helped. kind: the model's verdict."""
    helpful = measured.helpful
    if not helpful:
        best = measured.gains[0]
        words = f"no measured change helped {measured.where(kind)}; the best was {best.row}, {best.text}; see {PAGE}"
        return (Advice("none", "model", words, "# compare over seeds before you change the model"),)
    chosen = list(helpful[:SHOWN])
    cures = [gain for gain in helpful if gain.cure]
    if cures and cures[0] not in chosen:
        chosen.append(cures[0])
    return tuple(_measured_tip(gain, measured, kind) for gain in chosen)


def _measured_tip(gain: Gain, measured: Measured, kind: Kind) -> Advice:
    name = gain.cure or gain.row
    row = "" if gain.row == name else f"{gain.row}, "
    words = f"{row}{gain.text} over {measured.score:.1f} % for {measured.where(kind)}; see {PAGE}"
    return Advice(name, gain.place, words, gain.code)


def _from_papers(kind: Kind, onset: str, subject: Subject) -> tuple[Advice, ...]:
    tips = _for_graphs(subject) if subject.family == "pyg" else _for_transformers(kind, onset, subject)
    source = "suggested by its paper; nothing was measured on such a model with this verdict"
    return tuple(Advice(tip.cure, tip.place, f"{tip.reason} ({source})", tip.code) for tip in tips)


def follow_causes(
    causes: tuple[Cause, ...], tips: tuple[Advice, ...], subject: Subject, kind: Kind
) -> tuple[Advice, ...]:
    """Return what to try against the causes, the most important first; `tips` by kind of collapse if none has any.

    Where such models were measured, what was measured comes first. Tips against causes then have the settings that were
    measured and say their gain; those that did harm are left out.
    """
    found = tuple(dict.fromkeys(tip for cause in causes for tip in _against(cause, subject)))
    measured = find_measured(kind_of_model(subject), subject.blocks, kind)
    if not found or measured is None:
        return found or tips
    known = {gain.row: gain for gain in measured.gains}
    harmful = {gain.row for gain in measured.gains if gain.high < 0}
    left_out = {tip.cure for tip in tips} | harmful
    return (*tips, *(_with_gain(tip, known.get(tip.cure), measured, kind) for tip in found if tip.cure not in left_out))


def _with_gain(tip: Advice, gain: Gain | None, measured: Measured, kind: Kind) -> Advice:
    """Return a tip with the settings and the gain that were measured, if they were."""
    if gain is None:
        return tip
    words = f"{tip.reason}; measured: {gain.text} for {measured.where(kind)}"
    return replace(tip, place=gain.place, reason=words, code=gain.code)


def _against(cause: Cause, subject: Subject) -> tuple[Advice, ...]:
    """Return what to try against one cause."""
    graph = subject.family == "pyg"
    match cause.name:
        case "no_residual":
            words = "adds the residual connection that is missing"
            if graph:
                return (_tip("pre_activation_residual", "conv.output", f"{words}, around dropout"),)
            return (_tip("residual", "block", words, 'at="block"'),)
        case "vanishing_gradients" if graph:
            start = "[torch.nn.init.orthogonal_(w) for w in model.parameters() if w.dim() == 2]"
            return (Advice("initialization", "training", "keeps the size of gradients over depth", start),)
        case "vanishing_gradients" if "mlp.output" in subject.places:
            return (_tip("layer_scale", "mlp.output", "lets branches start small; also lower the learning rate"),)
        case "mixing":
            return _for_graphs(subject) if graph else _against_attention(subject)
        case "norm_growth" if "attention.norm.input" in subject.places:
            return (_tip("layer_norm_scaling", "attention.norm", "gives later blocks weight; train from scratch"),)
        case "few_directions":
            spread = "loss = loss + uc.covariance_loss(x)"
            whiten = 'uc.EmbeddingTransform("whiten").fit_transform(x)'
            return (
                Advice("covariance_loss", "training", "decorrelates features", spread),
                Advice("whiten", "embeddings", "spreads stored embeddings, without training", whiten),
            )
    return ()


def _against_attention(subject: Subject) -> tuple[Advice, ...]:
    place = "attention.residual" if "attention.residual" in subject.places else "block"
    named = f", modules={list(subject.modules)!r}" if subject.modules else ""
    spread = _tip("contra_norm", place, "spreads the tokens that attention averages", f"scale=0.1{named}")
    centered = _tip("centered_attention", "attention.context", "removes the mean from the output of attention")
    return (spread, centered) if "attention.context" in subject.places else (spread,)


def _for_graphs(subject: Subject) -> tuple[Advice, ...]:
    hidden = f', layers="first {subject.blocks - 1}"' if subject.outputs else ""
    contra = f'scale=1.0, preset="gnn"{hidden}'
    return (
        _tip("contra_norm", "conv.output", "after each convolution, excluding neighbors", contra),
        _tip("pair_norm", "conv.output", "preserves the total distance between nodes", hidden.removeprefix(", ")),
    )


def _for_transformers(kind: Kind, onset: str, subject: Subject) -> tuple[Advice, ...]:
    place = "attention.residual" if "attention.residual" in subject.places else "block"
    named = f", modules={list(subject.modules)!r}" if subject.modules else ""
    blocks = f"each block up to {onset}" if _layers(onset) else "each block"  # as the line of code has it
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
    return first, _tip("contra_norm", place, "the variant over features, designed for dimensional collapse", dual)


def _tip(cure: str, place: str, reason: str, options: str = "") -> Advice:
    return Advice(cure, place, reason, f'uc.attach(model, "{cure}"{", " if options else ""}{options})')


def _layers(onset: str) -> str:
    """Return the argument that selects the blocks up to and including one."""
    word, _, number = onset.partition(" ")
    return f', layers="first {int(number) + 1}"' if word == "block" and number.isdigit() else ""
