"""Rotary position settings of a model, read from its configuration, and the layouts that a transfer cannot undo.

Only configurations are read here: no weights, no torch. The tensor side takes its cosines and sines from the model's own rotary
module (kvbench.kv.rope); these settings say whether it may, and are pinned in the artifact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Topic = Literal["architecture", "attention", "rope"]
Scalar = float | int | bool | str

SUPPORTED_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

# Read off apply_rotary_pos_emb of transformers 5.24: pairs are neighbours (0, 1), (2, 3), ... and not (i, i + rotary_dim / 2).
INTERLEAVED_MODEL_TYPES = frozenset(
    """blt chatglm codegen cohere cohere2 cohere2_moe deepseek_v2 deepseek_v4 ernie4_5 ernie4_5_moe glm glm4 gptj helium llama4 llama4_text
    roformer""".split()  # noqa: SIM905
)
# The rotary module returns one cosine per pair, or turns the other way round.
OTHER_ROTATION_MODEL_TYPES = {
    "gpt_oss": "its rotary module returns half-width cosines",
    "nanochat": "it rotates with the opposite sign",
}
# Keys are normalised after they are rotated, so the cached key is not a rotation of any content key.
NORM_AFTER_ROTATION_MODEL_TYPES = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat"})
# The model code rotates the first rotary_dim entries of a head and passes the rest; elsewhere a factor below 1 is not understood.
PARTIAL_MODEL_TYPES = frozenset(
    ["gpt_neox", "gpt_neox_japanese", "glm4_moe", "minimax_m2", "nemotron", "persimmon", "phi", "phi3", "phi4_multimodal", "stablelm", "solar_open"]
)
ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt"})
LEARNED_POSITION_MODEL_TYPES = frozenset(["biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "git", "openai-gpt", "opt", "xglm"])
# Full-attention layers skip the rotation; sliding layers apply it.
NOPE_ON_FULL_LAYERS_MODEL_TYPES = frozenset(["afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"])
NOPE_ONLY_WITH_WINDOW = frozenset({"exaone4", "exaone_moe", "kolibri1"})


@dataclass(frozen=True)
class Refusal:
    """One reason, with its name, why a model cannot take part in a transfer.

    Attributes:
        code: The name, for instance `rope-dynamic-ntk`.
        value: The setting at fault, as `name=value`.
        reason: Why it is refused.
        remedy: What the user can do.
        topic: The row of the check it belongs to.
    """

    code: str
    value: str
    reason: str
    remedy: str
    topic: Topic


@dataclass(frozen=True)
class RopeSettings:
    """Rotary position settings of one model.

    Attributes:
        type: `default`, `linear`, `llama3`, `yarn`, another (refused) type, `per-layer`, or `none`.
        theta: Base of the frequencies; 0.0 where there is none.
        parameters: Scaling parameters beside type and theta, sorted by name.
        attention_factor: What the model multiplies cosines and sines with, hence the cached keys.
        rotary_dim: Entries of a head that rotate.
        interleaved: Whether neighbours form a pair.
    """

    type: str
    theta: float
    parameters: tuple[tuple[str, Scalar], ...]
    attention_factor: float
    rotary_dim: int
    interleaved: bool

    def to_dict(self) -> dict[str, object]:
        """The settings as JSON values."""
        return {
            "type": self.type,
            "theta": self.theta,
            "parameters": dict(self.parameters),
            "attention_factor": self.attention_factor,
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
        }

    def __str__(self) -> str:
        """One line for a table."""
        if self.type == "none":
            return "none"
        scaling = "".join(f", {name} {value}" for name, value in self.parameters)
        return f"{self.type}, theta {self.theta:g}, {self.rotary_dim} dims{scaling}"


def rope_parameters(config: PretrainedConfig) -> dict[str, object]:
    """The rope parameters of a text configuration, old names (`type`, `rope_theta` beside them) put right; empty without RoPE."""
    stated = getattr(config, "rope_parameters", None)
    found = dict(stated) if isinstance(stated, Mapping) else {}
    theta = getattr(config, "rope_theta", None)
    if not found and theta is None:
        return {}
    if not is_per_layer(found):
        found.setdefault("rope_type", found.pop("type", "default"))
        found.setdefault("rope_theta", theta)
    return found


def is_per_layer(parameters: Mapping[str, object]) -> bool:
    """Whether the settings are nested by layer type (gemma3, olmo3, ...), which needs several rotary modules."""
    return any(isinstance(value, Mapping) for value in parameters.values())


def yarn_attention_factor(parameters: Mapping[str, object]) -> float:
    """The factor YaRN puts on cosines and sines.

    Args:
        parameters: Flat rope parameters of type `yarn`.

    Returns:
        The stated factor, or 0.1 ln(s) + 1 for scale s, or the ratio of its mscale forms.

    Source: YaRN (arXiv:2309.00071) equation 22; the mscale ratio is DeepSeek's.
    """
    stated = parameters.get("attention_factor")
    if isinstance(stated, (int, float)):
        return float(stated)
    factor = _number(parameters, "factor", 1.0)
    mscale, mscale_all = _number(parameters, "mscale", 0.0), _number(parameters, "mscale_all_dim", 0.0)

    def grow(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return grow(mscale) / grow(mscale_all) if mscale and mscale_all else grow(1.0)


def rope_settings_of(config: PretrainedConfig, head_dim: int) -> RopeSettings:
    """Read the rotary settings of a text configuration.

    Args:
        config: Text configuration (of a multimodal model: its text part).
        head_dim: Entries of one head.

    Returns:
        The settings; `type` is `none` without rotary positions and `per-layer` where layer types differ.
    """
    parameters = rope_parameters(config)
    interleaved = config.model_type in INTERLEAVED_MODEL_TYPES
    if not parameters:
        return RopeSettings("none", 0.0, (), 1.0, 0, interleaved)
    if is_per_layer(parameters):
        flat = tuple(
            (f"{layer_type}.{name}", _scalar(value))
            for layer_type, settings in sorted(parameters.items())
            if isinstance(settings, Mapping)
            for name, value in sorted(settings.items())
            if value is not None
        )
        return RopeSettings("per-layer", 0.0, flat, 1.0, head_dim, interleaved)
    kind = str(parameters.get("rope_type", "default"))
    rest = {name: value for name, value in parameters.items() if name not in {"rope_type", "type", "rope_theta"} and value is not None}
    return RopeSettings(
        type=kind,
        theta=_number(parameters, "rope_theta", 0.0),
        parameters=tuple((name, _scalar(value)) for name, value in sorted(rest.items())),
        attention_factor=yarn_attention_factor(parameters) if kind == "yarn" else 1.0,
        rotary_dim=int(head_dim * _number(parameters, "partial_rotary_factor", 1.0)),
        interleaved=interleaved,
    )


def layers_without_rope(config: PretrainedConfig) -> tuple[int, ...]:
    """Layers that skip the rotation although the model has one (NoPE layers)."""
    flags = getattr(config, "no_rope_layers", None)
    if flags:
        return tuple(layer for layer, uses_rope in enumerate(flags) if not uses_rope)
    if config.model_type not in NOPE_ON_FULL_LAYERS_MODEL_TYPES:
        return ()
    if config.model_type in NOPE_ONLY_WITH_WINDOW and getattr(config, "sliding_window", None) is None:
        return ()
    layer_types = getattr(config, "layer_types", None) or ()
    return tuple(layer for layer, kind in enumerate(layer_types) if kind == "full_attention")


def rope_refusals(config: PretrainedConfig) -> list[Refusal]:
    """Why the keys of a model cannot be brought to content space; empty if they can.

    Args:
        config: Text configuration.
    """
    kind = config.model_type

    if kind in INTERLEAVED_MODEL_TYPES or any(getattr(config, name, False) for name in ("rope_interleave", "rope_interleaved", "rotary_interleaved")):
        return [_refuse("rope-interleaved", f"model_type={kind}", "it rotates neighbouring entries (interleaved rotary)")]
    if getattr(config, "alibi", False) or kind in ALIBI_MODEL_TYPES:
        return [_refuse("rope-none-alibi", f"model_type={kind}", "positions enter as ALiBi biases, not as rotary keys")]
    parameters = rope_parameters(config)
    if kind in LEARNED_POSITION_MODEL_TYPES:
        return [_refuse("rope-none-learned", f"model_type={kind}", "positions are learned embeddings inside keys and values")]
    if not parameters or str(getattr(config, "position_embedding_type", None)) == "nope":
        return [_refuse("rope-none", f"model_type={kind}", "its configuration states no rotary positions")]
    found = []
    if kind in OTHER_ROTATION_MODEL_TYPES:
        reason = f"{OTHER_ROTATION_MODEL_TYPES[kind]}, which an exact inverse would have to know"
        found.append(_refuse("rope-other-rotation", f"model_type={kind}", reason))
    if kind in NORM_AFTER_ROTATION_MODEL_TYPES:
        reason = "keys are normalised after rotation, so removing the rotation gives no content key"
        found.append(_refuse("rope-norm-after-rotation", f"model_type={kind}", reason))
    bare = layers_without_rope(config)
    if bare:
        reason = f"layers {short_list(bare)} do not rotate their keys (NoPE layers)"
        found.append(_refuse("rope-nope-layers", f"layers without rotation: {len(bare)}", reason, "Use models whose layers all rotate."))
    return found + _type_refusals(config, parameters)


def short_list(layers: tuple[int, ...], most: int = 8) -> str:
    """Layer numbers as text, shortened after `most` of them."""
    shown = ", ".join(str(layer) for layer in layers[:most])
    return shown if len(layers) <= most else f"{shown}, ... ({len(layers)} in all)"


_OTHER_FAMILY = "Use a family with rotate-half rotary positions (Llama, Qwen 2 and 3, Mistral, Gemma 1 and 2, OLMo 1 and 2, Granite, ...)."
_LENGTH_DEPENDENT = {
    "dynamic": ("rope-dynamic-ntk", "dynamic NTK scaling"),
    "longrope": ("rope-longrope", "longrope scaling"),
    "su": ("rope-longrope", "longrope (su) scaling"),
}


def _refuse(code: str, value: str, reason: str, remedy: str = _OTHER_FAMILY) -> Refusal:
    return Refusal(code, value, reason, remedy, "rope")


def _type_refusals(config: PretrainedConfig, parameters: Mapping[str, object]) -> list[Refusal]:
    if is_per_layer(parameters):
        named = ", ".join(
            f"{layer_type}: theta {settings.get('rope_theta')}" for layer_type, settings in parameters.items() if isinstance(settings, Mapping)
        )
        return [_refuse("rope-per-layer-type", f"rope_parameters={{{named}}}", "each layer type has rotary settings of its own")]
    found = []
    kind = str(parameters.get("rope_type", "default"))
    if kind in _LENGTH_DEPENDENT:
        code, name = _LENGTH_DEPENDENT[kind]
        reason = f"{name} depends on the current length, so cached keys were rotated with different bases"
        found.append(
            _refuse(
                code, f"rope_type={kind}", reason, "Use a model without it, or its short-context variant with default, linear, llama3 or yarn RoPE."
            )
        )
    elif kind not in SUPPORTED_TYPES:
        found.append(
            _refuse("rope-unknown-type", f"rope_type={kind}", "this rope type is not one that can be undone exactly (default, linear, llama3, yarn)")
        )
    if parameters.get("mrope_section") is not None:
        found.append(_refuse("rope-multi-axis", f"mrope_section={parameters['mrope_section']}", "positions have several axes (multimodal RoPE)"))
    share = _number(parameters, "partial_rotary_factor", 1.0)
    if share != 1.0 and config.model_type not in PARTIAL_MODEL_TYPES:
        reason = "only a part of each head rotates, and which part is not known for this model type"
        found.append(
            _refuse(
                "rope-partial",
                f"partial_rotary_factor={share:g}",
                reason,
                "Use a model that rotates whole heads, or the first entries of each head as GPT-NeoX, Phi and StableLM do.",
            )
        )
    return found


def _number(parameters: Mapping[str, object], name: str, default: float) -> float:
    value = parameters.get(name)
    return float(value) if isinstance(value, (int, float)) else default


def _scalar(value: object) -> Scalar:
    return value if isinstance(value, (bool, int, float, str)) else str(value)
