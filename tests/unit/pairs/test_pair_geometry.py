"""Geometry and RoPE settings, against the models and the RoPE functions of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from pair_models import llama
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvbench.errors import BadInputError
from kvbench.pairs.geometry import geometry_of, refusals
from kvbench.pairs.rope_settings import RopeSettings, rope_settings_of

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def test_geometry_of_a_llama() -> None:
    geometry = geometry_of(llama(rope_parameters={"rope_type": "default", "rope_theta": 1e5}))
    assert (geometry.model_type, geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.query_heads) == ("llama", 3, 2, 16, 4)
    assert (geometry.hidden_size, geometry.vocab_size, geometry.max_positions) == (64, 320, 512)
    assert geometry.attention == ("full", "full", "full")
    assert geometry.sliding_window is None
    assert geometry.rope == RopeSettings("default", 1e5, (), 1.0, 16, False)
    assert json.loads(json.dumps(geometry.to_dict(), allow_nan=False))["rope"]["theta"] == 1e5


@pytest.mark.parametrize("parameters", [LLAMA3, YARN, LINEAR], ids=["llama3", "yarn", "linear"])
def test_supported_rope_types_pass_and_keep_their_parameters(parameters: dict[str, Any]) -> None:
    config = llama(rope_parameters=dict(parameters))
    assert refusals(config) == []
    rope = rope_settings_of(config, 16)
    assert (rope.type, rope.theta, rope.rotary_dim) == (parameters["rope_type"], parameters["rope_theta"], 16)
    assert dict(rope.parameters) == {name: value for name, value in parameters.items() if name not in {"rope_type", "rope_theta"}}


@pytest.mark.parametrize(
    "extra",
    [{}, {"attention_factor": 1.25}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"factor": 1.0}, {"mscale": 1.0}],
    ids=["inferred", "stated", "mscales", "one", "half"],
)
def test_yarn_attention_factor_is_the_model_codes(extra: dict[str, float]) -> None:
    config = llama(rope_parameters={**YARN, **extra})
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert rope_settings_of(config, 16).attention_factor == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("model_type", "settings", "rotary_dim"),
    [
        ("gpt_neox", {"rotary_pct": 0.25}, 4),
        ("phi", {"partial_rotary_factor": 0.5}, 8),
        ("stablelm", {"partial_rotary_factor": 0.25}, 4),
        ("phi3", {}, 16),
    ],
)
def test_partial_rotary_on_the_first_entries_is_supported(model_type: str, settings: dict[str, float], rotary_dim: int) -> None:
    config = AutoConfig.for_model(model_type, hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=320, pad_token_id=0, **settings)
    assert refusals(config) == []
    assert geometry_of(config).rope.rotary_dim == rotary_dim


@pytest.mark.parametrize(
    ("settings", "heads"), [({}, 1), ({"multi_query": False, "num_kv_heads": 4}, 4), ({"new_decoder_architecture": True, "num_kv_heads": 2}, 4)]
)
def test_falcon_kv_heads_are_those_in_its_cache(settings: dict[str, Any], heads: int) -> None:
    config = AutoConfig.for_model("falcon", hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=320, **settings)
    with torch.no_grad():
        cache = AutoModelForCausalLM.from_config(config)(torch.arange(3)[None], use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == heads
    assert geometry_of(config).kv_heads == heads


def test_text_part_of_a_multimodal_configuration() -> None:
    text = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 320, "model_type": "llama"}
    geometry = geometry_of(AutoConfig.for_model("llava", text_config=text))
    assert (geometry.model_type, geometry.layers, geometry.head_dim) == ("llama", 2, 16)


def test_windows_stated_without_layer_types() -> None:
    assert geometry_of(llama(sliding_window=64, max_window_layers=2)).attention == ("full", "full", "sliding")
    assert geometry_of(llama(sliding_window=64, max_window_layers=9)).attention == ("full", "full", "full")
    assert geometry_of(llama(sliding_window=64)).sliding_layers == (0, 1, 2)
    assert geometry_of(llama(sliding_window=64, use_sliding_window=False)).sliding_layers == ()


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 2}),
    ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    ("gemma2", {"num_key_value_heads": 2, "head_dim": 32}),
    ("gpt_neox", {}),
    ("phi", {}),
    ("starcoder2", {"num_key_value_heads": 2}),
    ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    ("qwen3_moe", {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 96, "head_dim": 16}),
]


@pytest.mark.parametrize(("model_type", "settings"), MODELS, ids=[f"{row[0]}-{index}" for index, row in enumerate(MODELS)])
def test_parameter_estimate_is_close_to_the_model(model_type: str, settings: dict[str, Any]) -> None:
    small = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 3, "intermediate_size": 512, "vocab_size": 1000}
    config = AutoConfig.for_model(model_type, **{**small, **settings})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    # Biases and norms are left out: below 2 % at this width, less in real models.
    assert geometry_of(config).parameters == pytest.approx(count, rel=0.02)


def test_no_parameter_estimate_for_an_unread_model_type() -> None:
    assert geometry_of(AutoConfig.for_model("diffllama")).parameters is None


def test_a_configuration_without_sizes_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(BadInputError, match="vit states no vocab_size"):
        geometry_of(AutoConfig.for_model("vit"))


@pytest.mark.parametrize("module", ["kvbench.pairs.geometry", "kvbench.pairs.check", "kvbench.pairs.locate", "kvbench.cli.check"])
def test_importing_the_check_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
