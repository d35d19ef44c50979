"""Draw the figures of all pages from results/: `make figures`."""

from pathlib import Path

from uncollapse import Diagnosis, report
from website.pages import arena, concepts, graphs, hypersphere, text, trust, vision_plots
from website.plots import save

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "results" / "real_models", ROOT / "docs" / "images"

# plot -> measure and the diagnoses that it shows
FIGURES = {
    "real_minilm_cosine": ("robust_cosine", ["minilm"]),
    "real_minilm_rank": ("rank_share", ["minilm"]),
    "real_albert_cosine": ("robust_cosine", ["albert"]),
    "real_albert_rank": ("rank_share", ["albert"]),
    "real_smollm2_raw": ("effective_rank", ["smollm2"]),
    "real_smollm2_rank": ("rank_share", ["smollm2"]),
    "real_tiny_vit_cosine": ("robust_cosine", ["tiny_vit"]),
    "real_tiny_vit_rank": ("rank_share", ["tiny_vit"]),
    "real_whisper_cosine": ("robust_cosine", ["whisper"]),
    "real_whisper_rank": ("rank_share", ["whisper"]),
    "real_vit_cosine": ("robust_cosine", ["vit_layer_untrained", "vit_layer_trained", "vit_contra_trained"]),
    "real_vit_rank": ("effective_rank", ["vit_layer_untrained", "vit_layer_trained", "vit_contra_trained"]),
    "real_gcn_cosine": ("robust_cosine", ["gcn32_none", "gcn32_layer", "gcn32_contra"]),
    "real_gcn_rank": ("effective_rank", ["gcn32_none", "gcn32_layer", "gcn32_contra"]),
}


def main() -> None:
    """Draw each figure."""
    for name, (measure, subjects) in FIGURES.items():
        loaded = [Diagnosis.load(RESULTS / f"{subject}.json") for subject in subjects]
        diagnoses = [part for diagnosis in loaded for part in (diagnosis, *diagnosis.others)]
        print(save(report.plot(diagnoses, measure), IMAGES / f"{name}.svg").relative_to(ROOT))
    drawn = (arena, concepts, graphs, text, vision_plots, hypersphere, trust)
    for path in (path for module in drawn for path in module.draw()):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
