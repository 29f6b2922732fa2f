"""What the tables say about a model type's rotation, tested on a tiny random model of that type.

Layer 0 sees nothing but the embedding of its token. So for one token repeated, its keys differ by their rotation alone: once the rotation
is truly undone they are equal at all positions, and where the layout is another, or keys are normalised after rotation, they are not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.pairs.geometry import KNOWN_MODEL_TYPES, geometry_of, refusals

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_num_experts": 2}
GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
WINDOW = {"sliding_window": 32}
OWN: dict[str, dict[str, Any]] = {
    "cwm": WINDOW,
    "exaone4": {"layer_types": ["full_attention"] * 2, "sliding_window": None},
    "gemma2": WINDOW,
    "gpt_neox": {"num_key_value_heads": 4},
    "ministral": WINDOW,
    "persimmon": {"num_key_value_heads": 4},
    "smollm3": {"no_rope_layers": [1, 1]},
    "vaultgemma": WINDOW,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4,
}


def tiny(model_type: str, **settings: Any) -> Any:
    return AutoConfig.for_model(
        model_type, **{**SMALL, **EXPERTS, **GROUPS, "head_dim": 16, "pad_token_id": 0, **OWN.get(model_type, {}), **settings}
    )


@torch.no_grad()
def spread_over_positions(config: Any) -> float:
    """How far layer-0 keys of one repeated token are apart once unrotated, relative to the largest; about 1 if the inverse is wrong."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)  # norms too: a norm of ones commutes with any rotation
    keys = model(torch.full((1, 7), 5), use_cache=True).past_key_values.layers[0].keys
    cos, sin = model.get_decoder().rotary_emb(keys, torch.arange(7)[None])
    geometry = geometry_of(config)
    assert keys.shape == (1, geometry.kv_heads, 7, geometry.head_dim)
    width = geometry.rope.rotary_dim
    rotated = keys[..., :width] / geometry.rope.attention_factor**2
    turned = torch.cat((-rotated[..., width // 2 :], rotated[..., : width // 2]), dim=-1)
    content = torch.cat((rotated * cos - turned * sin, keys[..., width:]), dim=-1)
    return float((content - content[:, :, :1]).abs().max() / content.abs().max())


@pytest.mark.parametrize("model_type", sorted(KNOWN_MODEL_TYPES))
def test_known_model_types_are_undone_exactly(model_type: str) -> None:
    config = tiny(model_type)
    assert refusals(config) == []
    assert spread_over_positions(config) < 1e-5


@pytest.mark.parametrize("parameters", [YARN, LLAMA3, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}], ids=["yarn", "llama3", "linear"])
def test_scaled_rope_is_undone_exactly(parameters: dict[str, Any]) -> None:
    config = tiny("llama", rope_parameters=parameters, max_position_embeddings=16)
    assert geometry_of(config).rope.attention_factor == pytest.approx(1.138629436 if parameters is YARN else 1.0)  # 0.1 ln 4 + 1
    assert spread_over_positions(config) < 1e-5


@pytest.mark.parametrize("model_type", ["cohere", "glm", "glm4", "helium", "ernie4_5", "hunyuan_v1_dense", "nanochat"])
def test_refused_rotations_are_not_undone(model_type: str) -> None:
    config = tiny(model_type)
    assert refusals(config) != []
    assert spread_over_positions(config) > 0.1
