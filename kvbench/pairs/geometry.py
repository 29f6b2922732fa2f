"""Shape of a model's KV cache, read from its configuration, and the models refused by name because theirs is no plain cache.

No weights and no torch: a configuration is enough to say whether a pair can be tried.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.errors import BadInputError
from kvbench.pairs.rope_settings import Refusal, RopeSettings, Topic, rope_refusals, rope_settings_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LayerKind = Literal["full", "sliding"]
LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}

# Attention code read in transformers 5.24: keys are normalised (if at all), rotated, then cached, one K and V of equal width per layer.
# Other model types are tried with a warning; the gates on the loaded models decide.
KNOWN_MODEL_TYPES = frozenset(
    """apertus arcee aria_text bitnet cwm dots1 exaone4 flex_olmo gemma gemma2 glm4_moe gpt_neox granite granitemoe granitemoeshared hyperclovax jais2
    llama minimax_m2 ministral ministral3 mistral mixtral nemotron olmo olmo2 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
    seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma""".split()  # noqa: SIM905
)
# Some layers keep a state instead of keys and values.
STATE_MODEL_TYPES = frozenset(
    """bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_loop_text inkling2_text inkling_text jamba kimi_linear lfm2 lfm2_moe lfm3
    mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
    recurrent_gemma rwkv xlstm zamba zamba2 zaya""".split()  # noqa: SIM905
)
NON_CAUSAL_MODEL_TYPES = frozenset(
    """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta roberta-prelayernorm roc_bert
    roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod""".split()  # noqa: SIM905
)
CROSS_ATTENTION_MODEL_TYPES = frozenset({"mllama", "mllama_text_model"})
BORROWED_CACHE_MODEL_TYPES = frozenset({"gemma4_assistant", "gemma4_unified_assistant"})
REPEATED_DEPTH_MODEL_TYPES = frozenset({"hrm_text", "inkling2_loop_text"})
SINK_MODEL_TYPES = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "flint"})
UNGATED_MLP_MODEL_TYPES = frozenset({"apertus", "arcee", "gpt_neox", "jais2", "nemotron", "persimmon", "phi", "starcoder2"})

_UNEQUAL_LAYERS = "layers differ in their heads, and one cache geometry is required"


@dataclass(frozen=True)
class Geometry:
    """Shape of one model's cache and what belongs to it.

    Attributes:
        model_type: transformers' name of the architecture.
        layers: Layers that own a cache entry.
        kv_heads: Heads in the cache.
        head_dim: Entries per head.
        query_heads: Attention heads.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the embedding table.
        max_positions: Longest context of the configuration; None if it states none.
        parameters: Estimated parameter count; None where it cannot be told.
        attention: `full` or `sliding` per layer.
        sliding_window: Tokens that a sliding layer sees, its own included; None without sliding layers.
        rope: Rotary settings.
    """

    model_type: str
    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    parameters: int | None
    attention: tuple[LayerKind, ...]
    sliding_window: int | None
    rope: RopeSettings

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """Layers with a sliding window."""
        return tuple(layer for layer, kind in enumerate(self.attention) if kind == "sliding")

    def to_dict(self) -> dict[str, object]:
        """The geometry as JSON values."""
        return {**asdict(self), "attention": list(self.attention), "rope": self.rope.to_dict()}


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """The language model's part of a configuration (itself, unless the model is multimodal)."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


def geometry_of(config: PretrainedConfig) -> Geometry:
    """Read the geometry from a configuration.

    Args:
        config: A configuration of a model that `refusals` lets pass, or one near enough to be described.

    Raises:
        BadInputError: a setting that every decoder has is missing or is not one number.
    """
    text = text_config_of(config)
    query_heads = _size(text, "num_attention_heads", "n_heads", "n_head")
    hidden_size = _size(text, "hidden_size", "d_model", "n_embd")
    layers = _size(text, "num_hidden_layers", "n_layers", "n_layer")
    head_dim = _optional(text, "head_dim", "kv_channels") or hidden_size // query_heads
    attention = _attention(text, layers)
    return Geometry(
        model_type=text.model_type,
        layers=layers,
        kv_heads=_kv_heads(text, query_heads),
        head_dim=head_dim,
        query_heads=query_heads,
        hidden_size=hidden_size,
        vocab_size=_size(text, "vocab_size"),
        max_positions=_optional(text, "max_position_embeddings", "n_positions", "max_seq_len"),
        parameters=_parameters(text, layers, hidden_size, query_heads * head_dim, _kv_heads(text, query_heads) * head_dim),
        attention=attention,
        sliding_window=_optional(text, "sliding_window") if "sliding" in attention else None,
        rope=rope_settings_of(text, head_dim),
    )


def refusals(config: PretrainedConfig) -> list[Refusal]:
    """Every reason, by name, why a model cannot take part in a transfer; empty for a plain decoder with rotary positions.

    Args:
        config: The configuration as loaded, of any model.
    """
    if config.is_encoder_decoder:
        reason = "an encoder holds the context, and its cache is cross-attention"
        return [_refuse("encoder-decoder", f"model_type={config.model_type}", reason, "architecture")]
    try:
        text = text_config_of(config)
    except ValueError as error:
        return [_refuse("several-text-models", f"model_type={config.model_type}", str(error), "architecture")]
    found = _architecture_refusals(config, text)
    # Without a plain cache there are no keys whose rotation could be judged.
    return found or _attention_refusals(text) + rope_refusals(text)


def cautions(config: PretrainedConfig) -> list[Refusal]:
    """What the check warns of without refusing: unread attention code, code from the hub, attention sinks.

    Sliding windows are told apart by `Geometry.sliding_layers`.
    """
    text = text_config_of(config)
    found = []
    if text.model_type in SINK_MODEL_TYPES:
        reason = (
            "learned attention sinks take part in the softmax; they belong to the answering model, not to the cache, and a transfer leaves them be"
        )
        found.append(_refuse("attention-sinks", f"model_type={text.model_type}", reason, "attention", "Nothing to do; the gates measure it."))
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        reason = "the model runs code from its repository, which nobody here has read"
        found.append(_refuse("remote-code", f"auto_map of {text.model_type}", reason, "architecture", "Trust the gates on the loaded model."))
    elif text.model_type not in KNOWN_MODEL_TYPES:
        reason = "its attention code is not among those read for kvbench"
        found.append(
            _refuse("unknown-attention", f"model_type={text.model_type}", reason, "architecture", "The gates on the loaded model will decide.")
        )
    return found


def _architecture_refusals(config: PretrainedConfig, text: PretrainedConfig) -> list[Refusal]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = text.model_type
    value = f"model_type={kind}"
    if getattr(text, "is_heterogeneous", False) or getattr(text, "block_configs", None):
        return [_refuse("per-layer-geometry", value, _UNEQUAL_LAYERS, "architecture")]
    layer_types = set(getattr(text, "layer_types", None) or ())
    state_layers = {name for name in layer_types if any(word in name for word in ("linear", "mamba", "conv", "recurrent", "hybrid", "mlp", "ssm"))}
    if kind in STATE_MODEL_TYPES or state_layers:
        shown = f"layer_types={sorted(state_layers)}" if state_layers else value
        return [
            _refuse("state-space", shown, "layers keep a recurrent, state-space or linear-attention state instead of keys and values", "architecture")
        ]
    if getattr(text, "kv_lora_rank", None):
        reason = "the cache holds a compressed latent (MLA) that all heads share, not keys and values per head"
        return [_refuse("latent-kv", f"kv_lora_rank={text.kv_lora_rank}", reason, "architecture")]
    if kind in NON_CAUSAL_MODEL_TYPES:
        return [_refuse("non-causal", value, "attention looks both ways or permutes, so a prefix has no cache of its own", "architecture")]
    if kind in REPEATED_DEPTH_MODEL_TYPES:
        return [_refuse("repeated-depth", value, "layers run several times and own several cache entries each", "architecture")]
    if kind in CROSS_ATTENTION_MODEL_TYPES or getattr(text, "cross_attention_layers", None) or getattr(text, "add_cross_attention", False):
        return [_refuse("cross-attention", value, "some layers attend to another encoder's states", "architecture")]
    per_layer = [name for name in ("num_key_value_heads", "num_attention_heads", "head_dim") if isinstance(getattr(text, name, None), (list, tuple))]
    if per_layer:
        return [_refuse("per-layer-geometry", ", ".join(f"{name} per layer" for name in per_layer), _UNEQUAL_LAYERS, "architecture")]
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not known and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        reason = "transformers has no causal language model for this model type"
        return [_refuse("not-causal-lm", f"model_type={config.model_type}", reason, "architecture", "Give a decoder-only language model.")]
    return []


def _attention_refusals(text: PretrainedConfig) -> list[Refusal]:
    found = []
    shared = getattr(text, "num_kv_shared_layers", None) or (getattr(text, "cla_share_factor", None) if getattr(text, "use_cla", False) else None)
    if shared or text.model_type in BORROWED_CACHE_MODEL_TYPES:
        shown = f"num_kv_shared_layers={shared}" if shared else f"model_type={text.model_type}"
        found.append(_refuse("cross-layer-kv-sharing", shown, "some layers read another layer's keys and values and own none", "attention"))
    layer_types = getattr(text, "layer_types", None) or ()
    if getattr(text, "attention_chunk_size", None) and (not layer_types or "chunked_attention" in layer_types):
        reason = "chunked attention forgets everything before a chunk boundary, so a prefix is not seen as a whole"
        found.append(_refuse("chunked-attention", f"attention_chunk_size={text.attention_chunk_size}", reason, "attention"))
    strange = sorted(set(layer_types) - LAYER_KINDS.keys() - {"chunked_attention"})
    if strange:
        found.append(
            _refuse("unknown-layer-type", f"layer_types={strange}", "layers attend in a way that is neither full nor sliding-window", "attention")
        )
    value_dim = getattr(text, "v_head_dim", None)
    key_dim = _optional(text, "head_dim")
    if value_dim and key_dim and value_dim != key_dim:
        found.append(_refuse("value-head-dim", f"v_head_dim={value_dim}, head_dim={key_dim}", "keys and values have unequal width", "attention"))
    return found


def _refuse(
    code: str, value: str, reason: str, topic: Topic, remedy: str = "Use decoder-only models that cache keys and values in every layer."
) -> Refusal:
    return Refusal(code, value, reason, remedy, topic)


def _optional(config: PretrainedConfig, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _size(config: PretrainedConfig, *names: str) -> int:
    value = _optional(config, *names)
    if value is None:
        raise BadInputError(f"configuration of model_type={config.model_type} states no {names[0]}; give a decoder-only language model")
    return value


def _kv_heads(text: PretrainedConfig, query_heads: int) -> int:
    if text.model_type == "falcon":
        # Falcon repeats grouped heads before it caches them, and multi-query has one head whatever num_kv_heads says.
        if text.new_decoder_architecture:
            return query_heads
        return 1 if text.multi_query else int(text.num_kv_heads)
    if text.model_type == "gpt_bigcode":
        return 1 if text.multi_query else query_heads
    return _optional(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or query_heads


def _attention(text: PretrainedConfig, layers: int) -> tuple[LayerKind, ...]:
    full: LayerKind = "full"
    sliding: LayerKind = "sliding"
    layer_types = getattr(text, "layer_types", None)
    if layer_types:
        named: list[LayerKind] = [LAYER_KINDS.get(name, "full") for name in layer_types]
        return tuple(named)
    if not _optional(text, "sliding_window") or getattr(text, "use_sliding_window", True) is False or text.model_type == "olmoe":
        return (full,) * layers
    # Qwen3-MoE keeps max_window_layers in its file and ignores it.
    first = 0 if text.model_type == "qwen3_moe" else _optional(text, "max_window_layers") or 0
    return (full,) * min(first, layers) + (sliding,) * max(0, layers - first)


def _parameters(text: PretrainedConfig, layers: int, hidden: int, query_width: int, kv_width: int) -> int | None:
    inner = _optional(text, "intermediate_size", "ffn_dim", "n_inner")
    vocabulary = _optional(text, "vocab_size")
    if inner is None or vocabulary is None or text.model_type not in KNOWN_MODEL_TYPES:
        return None
    matrices = 2 if text.model_type in UNGATED_MLP_MODEL_TYPES else 3
    experts = _optional(text, "num_experts", "num_local_experts", "n_routed_experts")
    dense_layers = layers if experts is None else min(layers, getattr(text, "first_k_dense_replace", 0) or 0)
    feed_forward = dense_layers * matrices * hidden * inner
    if experts is not None:
        expert_inner = _optional(text, "moe_intermediate_size") or inner
        shared = (getattr(text, "n_shared_experts", 0) or 0) * expert_inner + (_optional(text, "shared_expert_intermediate_size") or 0)
        feed_forward += (layers - dense_layers) * (matrices * hidden * (experts * expert_inner + shared) + experts * hidden)
    attention = layers * 2 * hidden * (query_width + kv_width)
    tables = 1 if getattr(text, "tie_word_embeddings", False) else 2
    return attention + feed_forward + tables * vocabulary * hidden
