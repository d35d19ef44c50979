"""Every model type of transformers, built by `AutoModel` from its own config with small numbers."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .entries import IMAGE, LENGTH, Built, Entry, padded_mask

WIDTH, HEADS, LAYERS, VOCABULARY = 32, 4, 3, 120
# Names of config fields -> small values. A field is set only where the config has it with a value of the same type.
_WIDTHS = (
    *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "projection_dim"),
    *("hidden_dim", "encoder_hidden_size", "decoder_hidden_size", "cross_attention_hidden_size", "text_embed_dim"),
    *("lru_width", "model_dim", "attention_hidden_size", "n_state", "vision_hidden_size", "conv_dim_out"),
    *("mask_feature_size", "feature_size", "out_hidden_size", "d_embed", "text_hidden_size", "cross_hidden_size"),
)
_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"),
    *("num_encoder_layers", "num_decoder_layers", "encoder_num_layers", "decoder_num_layers", "num_blocks"),
    *("num_local_layers", "num_transformer_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("decoder_num_attention_heads", "encoder_num_attention_heads", "num_self_attention_heads"),
    *("num_cross_attention_heads", "kv_n_heads"),
)
_INNER = (
    *("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "dim_feedforward"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "feed_forward_hidden_size", "mlp_hidden_size"),
    *("ffn_hidden_size", "expert_ffn_hidden_size", "decoder_intermediate_size", "encoder_intermediate_size"),
    *("dense_intermediate_size", "shared_intermediate_size"),
)
SMALL: dict[str, Any] = (
    dict.fromkeys(_WIDTHS, WIDTH)
    | dict.fromkeys(_LAYERS, LAYERS)
    | dict.fromkeys(_HEADS, HEADS)
    | dict.fromkeys(_INNER, 2 * WIDTH)
    | {
        "vocab_size": VOCABULARY,
        "text_vocab_size": VOCABULARY,
        "head_dim": WIDTH // HEADS,
        "d_kv": WIDTH // HEADS,
        "num_key_value_heads": 2,
        "num_kv_heads": 2,
        "max_position_embeddings": 64,
        "n_positions": 64,
        "max_source_positions": 64,
        "max_target_positions": 64,
        "image_size": IMAGE,
        "patch_size": 8,
        "num_frames": 4,
        "tubelet_size": 2,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "moe_num_experts": 4,
        "num_experts_per_tok": 2,
        "num_experts_per_token": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "state_size": 8,
        "mamba_d_state": 8,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_expand": 2,
        "num_mel_bins": 16,
        "type_vocab_size": 2,
        "num_queries": 8,
        "max_2d_position_embeddings": 64,
        "entity_vocab_size": 20,
        "num_codebooks": 2,
        "context_size": 16,
        "window_size": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
# What the rule above gets wrong: config fields by model type; a value of a nested config is a dictionary.
OWN: dict[str, dict[str, Any]] = {
    "longformer": {"attention_window": 4},
    "led": {"attention_window": 4},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "funnel": {
        "block_sizes": [2, 2],
        "d_inner": 64,
        "d_head": 8,
        "n_head": 4,
        "num_hidden_layers": None,
        "num_blocks": None,
    },
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64, 96, 128], "num_groups": 4},
    "bridgetower": {"vision_config": {"hidden_size": 64}},
    "esmc": {"num_key_value_heads": HEADS},
    "xmod": {"default_language": "en_XX"},
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "xlnet": {"d_inner": 64, "max_position_embeddings": None},
    "transfo-xl": {"max_position_embeddings": None},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4},
    "reformer": {"axial_pos_shape": [4, 16], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "local"]},
    "mobilenet_v2": {"image_size": 48},  # at 32 pixels, features and sides of the first image have the same size
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": HEADS},
    "vits": {
        **{"flow_size": WIDTH, "spectrogram_bins": 33, "upsample_initial_channel": WIDTH, "upsample_rates": [2, 2]},
        **{"upsample_kernel_sizes": [4, 4], "duration_predictor_filter_channels": WIDTH, "window_size": 4},
        **{"posterior_encoder_num_wavenet_layers": 2, "prior_encoder_num_wavenet_layers": 2},
        **{"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]},
    },
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "mamba2": {"head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": HEADS, "head_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_key_value_heads": 2,
        "mamba_chunk_size": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"head_dim": 8, "num_key_value_heads": 2},
    "hunyuan_vl_text": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
    "lilt": {"hidden_size": 48},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": IMAGE, "visual_embed": False},
    "prophetnet": {"num_hidden_layers": None},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 4},
    "swin2sr": {"window_size": 4, "patch_size": 1, "embed_dim": WIDTH, "depths": [2, 2], "num_heads": [2, 2]},
}
# What takes sound as (samples, 1 channel, time), and what takes texts and images together without two configs inside.
MONO = ("dac", "mimi_encoder", "pe_audio_encoder")
TOGETHER = ("vilt", "udop")


BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "feature_projection_input_dim")
DEAD = dict.fromkeys(("mra", "yoso"), "its attention is zero without a kernel for CUDA")
MROPE = {"glm4v_moe_text": [1, 1, 0], "glm4v_moe": [1, 1, 0]}  # sections of rotary positions; they fill half a head


def entries(library: str) -> Iterator[Entry]:
    """Yield an entry for each model type."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for model_type in MODEL_MAPPING_NAMES:
        yield Entry(f"transformers/{model_type}", model_type)


def build(library: str, model_type: str) -> Built:
    """Build a small model of a type and the inputs that its forward pass asks for."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in DEAD:
        raise NotImplementedError(DEAD[model_type])
    config = shrink(CONFIG_MAPPING[model_type], OWN.get(model_type, {}))
    config.architectures = config.architectures or []
    model = AutoModel.from_config(config).eval()
    return Built(model, [_inputs(model, 3, LENGTH, 0), _inputs(model, 2, LENGTH - 2, 1)], "input_ids")


def shrink(kind: type, own: dict[str, Any]) -> Any:
    """Create a config of a class with small numbers, and small configs inside it."""
    default = kind()
    given = {name: value for name, value in SMALL.items() if _has_number(default, name)}
    if _has_number(default, "kv_lora_rank"):
        given["num_key_value_heads"] = HEADS
    if isinstance(getattr(default, "depths", None), list | tuple):  # each stage halves the image
        given = {name: value for name, value in given.items() if name not in _LAYERS}
        given |= {"patch_size": 2} if "patch_size" in given else {}
    for name, value in vars(default).items():
        if hasattr(value, "to_dict") and hasattr(type(value), "model_type"):
            given[name] = shrink(type(value), own.get(name, {}))
        elif isinstance(value, list | tuple) and name not in given:
            given |= {} if (short := _shorten(name, value)) is None else {name: short}
    given |= {name: value for name, value in own.items() if not isinstance(value, dict)}
    given = {name: value for name, value in given.items() if own.get(name, value) is not None}
    try:
        config = kind(**given)
    except AttributeError as error:  # a field that follows from others cannot be set
        fixed = next(name for name in given if f"'{name}'" in str(error))
        config = kind(**{name: value for name, value in given.items() if name != fixed})
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        rope["mrope_section"] = MROPE.get(getattr(config, "model_type", ""), [2, 1, 1])
        rope["rope_theta"] = rope.get("rope_theta") or 10000.0
    return config


def _has_number(config: Any, name: str) -> bool:
    try:
        value = getattr(config, name, None)
    except AttributeError:  # one value per layer
        return False
    optional = name.endswith("token_id") and hasattr(config, name)
    return optional or (isinstance(value, int) and not isinstance(value, bool))


def _shorten(name: str, value: Any) -> list[Any] | None:
    """Return a list of a config for fewer layers or narrower stages; None if it is not one of these."""
    if name in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attention_layers"):
        every = sorted(set(value), key=lambda kind: list(value).index(kind))  # of each kind at least one
        return [*(every[:1] * (LAYERS - len(every))), *every][-LAYERS:]
    if name in ("num_heads", "num_attention_heads") and all(isinstance(v, int) for v in value):
        return [2**number for number in range(len(value))]
    if name in ("depths", "layer_depths", "num_encoder_blocks"):
        return [2 if number < 2 else 1 for number in range(len(value))]
    if name == "conv_dim":
        return [WIDTH] * len(value)
    if name in ("hidden_sizes", "embed_dims", "encoder_hidden_sizes") and all(isinstance(v, int) for v in value):
        return [24 * 2**number for number in range(len(value))]
    return None


def _inputs(model: nn.Module, count: int, length: int, seed: int) -> dict[str, Tensor]:
    """Return the inputs of a model by the names of its arguments: text with padding, images, video or sound."""
    names, config = list(inspect.signature(model.forward).parameters), _flat(model.config)
    random = torch.Generator().manual_seed(seed)
    main = model.main_input_name if model.main_input_name in names else names[0]
    both = _takes_both(model)
    found: dict[str, Tensor] = {}
    if main == "input_ids" or (both and "input_ids" in names):
        found |= _texts(names, count, length, random)
    if main == "pixel_values" or (both and "pixel_values" in names):
        found |= _images(model, config, count, random)
    if main == "input_features":
        found |= _spectrogram(model, config, count, random)
    if main in ("input_features", "input_values") and "decoder_input_ids" in names:
        found["decoder_input_ids"] = torch.randint(5, VOCABULARY, (count, length), generator=random)
    if main == "input_values":
        shape = [config[name] for name in ("max_length", "num_mel_bins") if name in config]
        mono = [1] if model.config.model_type in MONO else []
        found[main] = torch.randn(count, *(shape if len(shape) == 2 else [*mono, 4000 - 640 * seed]), generator=random)
    if main == "past_values" and "context_length" in config:
        channels = [config["num_input_channels"]] if "num_input_channels" in config else []
        found[main] = torch.randn(count, config["context_length"], *channels, generator=random)
    if main not in found:
        raise NotImplementedError(f"no inputs for {main}")
    return found


def _texts(names: list[str], count: int, length: int, random: torch.Generator) -> dict[str, Tensor]:
    found = {"input_ids": torch.randint(5, VOCABULARY, (count, length), generator=random)}
    if "attention_mask" in names:
        found["attention_mask"] = padded_mask(count, length)
    if "bbox" in names:
        corners = torch.randint(0, 30, (count, length, 2), generator=random)
        found["bbox"] = torch.cat([corners, corners + 5], -1)
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = torch.randint(5, VOCABULARY, (count, length - 2), generator=random)
    return found


def _images(model: nn.Module, config: dict[str, Any], count: int, random: torch.Generator) -> dict[str, Tensor]:
    size, channels = config.get("image_size", IMAGE), config.get("num_channels", 3)
    size = size if isinstance(size, int) else size[0]
    frames = (config.get("num_frames", 4),) if _is_video(model) else ()
    return {"pixel_values": torch.randn(count, *frames, channels, size, size, generator=random)}


def _spectrogram(model: nn.Module, config: dict[str, Any], count: int, random: torch.Generator) -> dict[str, Tensor]:
    bins = next((config[name] for name in BINS if name in config), 16)
    bins_first = model.config.model_type in ("whisper", "qwen2_audio_encoder", "voxtral_encoder")
    time = 64 if count > 2 else 56  # two lengths show the axis of features
    return {"input_features": torch.randn(count, *((bins, 128) if bins_first else (time, bins)), generator=random)}


def _is_video(model: nn.Module) -> bool:
    return any(word in model.config.model_type for word in ("videomae", "timesformer", "vivit", "vjepa"))


def _takes_both(model: Any) -> bool:
    """Return whether a model takes both texts and images in one call, as two towers do."""
    if model.config.model_type in TOGETHER:
        return True
    subs, fields = set(getattr(model.config, "sub_configs", {})), vars(model.config)
    inserted = ("image_token_id", "image_token_index", "image_token")  # the images replace some of the tokens
    return {"text_config", "vision_config"} <= subs and not any(name in fields for name in inserted)


def _flat(config: Any) -> dict[str, Any]:
    """Return the fields of a config; those of configs inside it only where it has none of that name."""
    found: dict[str, Any] = {}
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(type(value), "model_type"):
            found |= _flat(value)
    return found | {name: value for name, value in vars(config).items() if value is not None}
