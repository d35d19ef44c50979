"""Find representation collapse in deep networks, fix it, and verify the fix.

>>> import torch, uncollapse as uc
>>> x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
>>> bool((uc.mean_cosine(uc.contra_norm(x, 1.0)) < uc.mean_cosine(x)).all())
True
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in _PUBLIC, for editors and type checkers
    from uncollapse import cures as cures
    from uncollapse import losses as losses
    from uncollapse import metrics as metrics
    from uncollapse import pairwise as pairwise
    from uncollapse.attachment.attach import Attachment as Attachment
    from uncollapse.attachment.attach import attach as attach
    from uncollapse.attachment.attach import attachments as attachments
    from uncollapse.attachment.attach import detach as detach
    from uncollapse.attachment.attach import places as places
    from uncollapse.attachment.inner_tokens import Tokens as Tokens
    from uncollapse.attachment.inner_tokens import tokens as tokens
    from uncollapse.attachment.save import load_cure as load_cure
    from uncollapse.attachment.save import save_cure as save_cure
    from uncollapse.cures import *  # noqa: F403
    from uncollapse.diagnosis.activations import diagnose_activations as diagnose_activations
    from uncollapse.diagnosis.build import Labels as Labels
    from uncollapse.diagnosis.embeddings import RowStatistics as RowStatistics
    from uncollapse.diagnosis.embeddings import diagnose_rows as diagnose_rows
    from uncollapse.diagnosis.result import Diagnosis as Diagnosis
    from uncollapse.diagnosis.run import diagnose as diagnose
    from uncollapse.diagnosis.stats.moments import Moments as Moments
    from uncollapse.diagnosis.stats.reservoir import Reservoir as Reservoir
    from uncollapse.diagnosis.target import Plan as Plan
    from uncollapse.embeddings.transform import EmbeddingTransform as EmbeddingTransform
    from uncollapse.losses import *  # noqa: F403
    from uncollapse.metrics import *  # noqa: F403
    from uncollapse.monitoring.geometry_evaluator import GeometryEvaluator as GeometryEvaluator
    from uncollapse.monitoring.monitor import CollapseWarning as CollapseWarning
    from uncollapse.monitoring.monitor import Monitor as Monitor
    from uncollapse.monitoring.monitor import Rule as Rule
    from uncollapse.registry import CURES as CURES
    from uncollapse.registry import LOSSES as LOSSES
    from uncollapse.registry import METRICS as METRICS
    from uncollapse.tuning.tune_model import Tuned as Tuned
    from uncollapse.tuning.tune_model import tune as tune

__version__ = "0.1.0"

# The public names and the module of each, which is imported when a name is first used: torch alone takes a second.
_PUBLIC = {
    "uncollapse": "cures losses metrics pairwise __version__",
    "uncollapse.attachment.attach": "Attachment attach attachments detach places",
    "uncollapse.attachment.inner_tokens": "Tokens tokens",
    "uncollapse.attachment.save": "load_cure save_cure",
    "uncollapse.cures": "AttnScale CenteredAttention ContraNorm DiffGroupNorm DropEdge FeatScale GFSA InitialResidual "
    "LayerNormScaling LayerScale MeanSubtraction NeuTRENO NodeNorm OutputGate PairNorm PreActivationResidual "
    "Residual ValueResidual attn_scale centered_attention contra_norm diff_group_norm drop_edge feat_scale "
    "gfsa initial_residual layer_norm_scaling layer_scale mean_subtraction neutreno node_norm "
    "output_gate pair_norm pre_activation_residual residual value_residual",
    "uncollapse.diagnosis.activations": "diagnose_activations",
    "uncollapse.diagnosis.build": "Labels",
    "uncollapse.diagnosis.embeddings": "RowStatistics diagnose_rows",
    "uncollapse.diagnosis.result": "Diagnosis",
    "uncollapse.diagnosis.run": "diagnose",
    "uncollapse.diagnosis.stats.moments": "Moments",
    "uncollapse.diagnosis.stats.reservoir": "Reservoir",
    "uncollapse.diagnosis.target": "Plan",
    "uncollapse.embeddings.transform": "EmbeddingTransform",
    "uncollapse.losses": "PatchMix SentenceLoss align_loss contra_uniform_loss covariance_loss cutmix_patches "
    "dispersion_loss global_orthogonal_loss gram_anchor_loss info_nce koleo_loss patch_contrastive_loss "
    "patch_cosine_loss patch_mixing_loss sigreg_loss uniform_loss variance_loss visreg_loss",
    "uncollapse.metrics": "Interval alignment alignment_interval alpha_req attention_entropy attention_similarity "
    "attention_std dense_structure dirichlet_energy effective_rank feature_correlation feature_variance gram_drift "
    "group_distance_ratio lidar mean_average_distance mean_cosine outlier_share pairwise_potential "
    "participation_ratio rankme singular_values stable_rank token_variance uniformity uniformity_gap "
    "uniformity_interval uniformity_optimum",
    "uncollapse.monitoring.geometry_evaluator": "GeometryEvaluator",
    "uncollapse.monitoring.monitor": "CollapseWarning Monitor Rule",
    "uncollapse.registry": "CURES LOSSES METRICS",
    "uncollapse.tuning.tune_model": "Tuned tune",
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = sorted(_MODULES)


if not TYPE_CHECKING:  # a type checker would take any name, also a misspelt one

    def __getattr__(name: str) -> Any:
        """Import a public name, a module of the package, or an entry that a file in one of its folders registered."""
        if name.startswith("__"):  # Python and its tools ask every module for such names
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if _MODULES.get(name, __name__) != __name__:
            value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
            return value
        if name.isidentifier() and find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        return _find_registered(name)


def _find_registered(name: str) -> Any:
    """Return the function or layer of a registry's entry that _PUBLIC does not list."""
    from uncollapse.errors import did_you_mean
    from uncollapse.registry import CURES, LOSSES, METRICS

    for registry in (METRICS, CURES, LOSSES):
        if name in registry:
            return registry[name].function
    for entry in CURES.values():
        if name == entry.layer.__name__:
            return entry.layer
    message = f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}"
    raise AttributeError(message, name=name)  # with a name, Python does not append the same suggestion again


def __dir__() -> list[str]:
    """List all public names, for editors."""
    return sorted({*globals(), *__all__})
