"""Every refusal and warning of the check, by name, with tiny configurations on disk."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from pair_models import SaveModel, llama
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvbench.errors import IncompatiblePairError
from kvbench.pairs.check import check_pair
from kvbench.pairs.geometry import KNOWN_MODEL_TYPES, cautions, geometry_of, refusals
from kvbench.pairs.rope_settings import INTERLEAVED_MODEL_TYPES

Build = Callable[[], PretrainedConfig]


def of(model_type: str, **settings: object) -> Build:
    return lambda: AutoConfig.for_model(model_type, **settings)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
    "factor": 2.0,
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 320}
PHI3 = {**SMALL, "pad_token_id": 0, "max_position_embeddings": 512, "original_max_position_embeddings": 256}

# (code, row, configuration, words of the message)
REFUSALS: list[tuple[str, str, Build, str]] = [
    ("encoder-decoder", "architecture", of("t5"), "cross-attention"),
    ("encoder-decoder", "architecture", of("bart"), "cross-attention"),
    ("state-space", "architecture", of("mamba", num_hidden_layers=2), "state"),
    ("state-space", "architecture", of("falcon_mamba", num_hidden_layers=2), "state"),
    ("state-space", "architecture", of("jamba"), "state"),
    ("state-space", "architecture", of("qwen3_next"), "linear_attention"),
    ("state-space", "architecture", of("rwkv"), "state"),
    ("state-space", "architecture", of("lfm2"), "state"),
    ("state-space", "architecture", of("recurrent_gemma"), "state"),
    ("latent-kv", "architecture", of("deepseek_v2", num_hidden_layers=2), "kv_lora_rank"),
    ("latent-kv", "architecture", of("deepseek_v3", num_hidden_layers=2), "kv_lora_rank"),
    ("non-causal", "architecture", of("bert"), "looks both ways"),
    ("non-causal", "architecture", of("xlnet"), "looks both ways"),
    ("not-causal-lm", "architecture", of("vit"), "no causal language model"),
    ("cross-attention", "architecture", of("mllama"), "encoder"),
    ("per-layer-geometry", "architecture", of("gemma4_text"), "differ in their heads"),
    ("repeated-depth", "architecture", of("hrm_text"), "several times"),
    ("cross-layer-kv-sharing", "attention layout", of("gemma3n_text"), "num_kv_shared_layers=15"),
    ("chunked-attention", "attention layout", of("llama4_text"), "attention_chunk_size=8192"),
    ("value-head-dim", "attention layout", of("mimo_v2_flash"), "v_head_dim=128, head_dim=192"),
    ("unknown-layer-type", "attention layout", of("deepseek_v4"), "neither full nor sliding"),
    ("rope-none-learned", "rope", of("gpt2"), "learned"),
    ("rope-none-learned", "rope", of("opt"), "learned"),
    ("rope-none-alibi", "rope", of("bloom"), "ALiBi"),
    ("rope-none-alibi", "rope", of("mpt"), "ALiBi"),
    ("rope-none-alibi", "rope", of("falcon", alibi=True), "ALiBi"),
    ("rope-none", "rope", of("cpmant"), "no rotary"),
    ("rope-nope-layers", "rope", of("smollm3", **SMALL, pad_token_id=0), "layers 3 do not rotate"),
    ("rope-nope-layers", "rope", of("exaone4", **SMALL), "NoPE"),
    ("rope-interleaved", "rope", of("cohere", **SMALL), "interleaved"),
    ("rope-interleaved", "rope", of("glm"), "interleaved"),
    ("rope-interleaved", "rope", of("gptj"), "interleaved"),
    ("rope-other-rotation", "rope", of("gpt_oss"), "half-width"),
    ("rope-other-rotation", "rope", of("nanochat"), "opposite sign"),
    ("rope-norm-after-rotation", "rope", of("hunyuan_v1_dense"), "normalised after rotation"),
    ("rope-per-layer-type", "rope", of("gemma3_text"), "full_attention: theta 1000000"),
    ("rope-per-layer-type", "rope", of("gemma3"), "sliding_attention: theta 10000"),
    (
        "rope-dynamic-ntk",
        "rope",
        lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "depends on the current length",
    ),
    ("rope-longrope", "rope", lambda: llama(rope_parameters=LONGROPE), "depends on the current length"),
    ("rope-longrope", "rope", of("phi3", **PHI3, rope_parameters=LONGROPE), "short-context variant"),
    (
        "rope-unknown-type",
        "rope",
        lambda: llama(rope_parameters={"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 1.0}),
        "rope_type=proportional",
    ),
    ("rope-partial", "rope", lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}), "0.5"),
    ("rope-multi-axis", "rope", lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}), "[2, 3, 3]"),
]


@pytest.mark.parametrize(("code", "row_name", "build", "words"), REFUSALS, ids=[f"{row[0]}-{index}" for index, row in enumerate(REFUSALS)])
def test_refused_by_name_as_source_and_as_target(code: str, row_name: str, build: Build, words: str, save_model: SaveModel) -> None:
    refused, plain = save_model(build(), name="refused", with_tokenizer=False), save_model(name="plain")
    for pair, role in (((refused, plain), "source"), ((plain, refused), "target")):
        report = check_pair(*pair)
        assert not report.compatible
        row = next(row for row in report.rows if row.name == f"{row_name} of {role}")
        assert row.status == "refuse"
        assert code in row.codes
        assert row.remedy
        with pytest.raises(IncompatiblePairError) as raised:
            report.raise_if_refused()
        assert raised.value.exit_code == 4
        assert code in str(raised.value)
        assert words in str(raised.value)
        # The tokenizer is missing too, which must not hide the refusal.
        assert "tokenizer-unread" in report.rows[-1].codes


@pytest.mark.parametrize(
    ("code", "settings"),
    [
        ("per-layer-geometry", {"num_key_value_heads": [2, 1, 2]}),
        ("per-layer-geometry", {"block_configs": [{}, {}]}),
        ("cross-layer-kv-sharing", {"use_cla": True, "cla_share_factor": 2}),
        ("latent-kv", {"kv_lora_rank": 64}),
        ("cross-attention", {"add_cross_attention": True}),
        ("rope-none-alibi", {"alibi": True}),
        ("rope-none", {"rope_theta": None}),
        ("rope-none", {"position_embedding_type": "nope"}),
        ("rope-interleaved", {"rope_interleaved": True}),
        ("rope-dynamic-ntk", {"rope_parameters": {"type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("rope-longrope", {"rope_parameters": {"type": "su", "rope_theta": 1e4}}),
        ("several-text-models", {"decoder": PretrainedConfig(), "text_config": PretrainedConfig()}),
    ],
)
def test_configurations_from_elsewhere_are_refused_by_what_they_say(code: str, settings: dict[str, object]) -> None:
    config = PretrainedConfig(auto_map={"AutoModelForCausalLM": "own.Model"})
    for name, value in ({"rope_theta": 1e4} | settings).items():
        setattr(config, name, value)
    found = refusals(config)
    assert [refusal.code for refusal in found] == [code]


def warned(model: str, other: str) -> dict[str, str]:
    report = check_pair(model, other)
    assert report.compatible, [str(row) for row in report.refused]
    return {code: f"{row.source} {row.detail} {row.remedy}" for row in report.rows for code in row.codes}


def test_sliding_window_of_some_layers_names_them_and_the_context_they_cover(save_model: SaveModel) -> None:
    settings = {**SMALL, "head_dim": 16, "max_position_embeddings": 512}
    gemma2 = AutoConfig.for_model("gemma2", **settings, sliding_window=32)
    found = warned(save_model(gemma2, name="gemma2"), save_model())
    assert found.keys() == {"sliding-window"}
    assert "window 32 in 2 of 4 layers" in found["sliding-window"]
    assert "layers: 0, 2." in found["sliding-window"]
    assert "up to 32 tokens" in found["sliding-window"]


def test_sliding_window_from_max_window_layers(save_model: SaveModel) -> None:
    settings = {**SMALL, "max_position_embeddings": 512, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    qwen2 = save_model(AutoConfig.for_model("qwen2", **settings))
    assert "layers: 3." in warned(qwen2, qwen2)["sliding-window"]
    off = AutoConfig.for_model("qwen2", **{**settings, "use_sliding_window": False})
    assert geometry_of(off).attention == ("full",) * 4


@pytest.mark.parametrize(("window", "codes"), [(100, {"sliding-window"}), (512, set()), (None, set())])
def test_sliding_window_as_long_as_the_context_is_no_warning(window: int | None, codes: set[str], save_model: SaveModel) -> None:
    mistral = AutoConfig.for_model("mistral", **SMALL, max_position_embeddings=512, sliding_window=window)
    assert warned(save_model(mistral, name="mistral"), save_model()).keys() == codes


def test_attention_sinks_warn(save_model: SaveModel) -> None:
    granite = AutoConfig.for_model("granite_swa", **SMALL, head_dim=16, max_position_embeddings=512)
    found = warned(save_model(granite, name="sinks"), save_model())
    assert "softmax" in found["attention-sinks"]
    assert "unknown-attention" in found


def test_model_type_that_nobody_read_warns_and_leaves_it_to_the_gates(save_model: SaveModel) -> None:
    unread = AutoConfig.for_model("diffllama", **SMALL, max_position_embeddings=512)
    assert "gates on the loaded model will decide" in warned(save_model(unread, name="unread"), save_model())["unknown-attention"]


def test_remote_code_warns() -> None:
    config = llama(auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert [caution.code for caution in cautions(config)] == ["remote-code"]


def test_every_causal_model_type_is_refused_or_described() -> None:
    described = []
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if model_type not in CONFIG_MAPPING:
            continue
        try:
            config = AutoConfig.for_model(model_type)
        except Exception:  # some have no usable defaults
            continue
        found = refusals(config)
        assert all(refusal.code and refusal.reason and refusal.remedy for refusal in found), model_type
        if not found:
            geometry = geometry_of(config)
            assert min(geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.rope.rotary_dim) > 0, model_type
            assert len(geometry.attention) == geometry.layers, model_type
            described.append(model_type)
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt_neox"} <= set(described)


def rotate_half_of(model_type: str) -> torch.Tensor:
    """What the installed model code makes of 0..7; neighbours or halves show at once."""
    module = model_type_to_module_name(model_type)
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    rotate = getattr(code, "rotate_half", None) or code.rotate_every_two
    rotated: torch.Tensor = rotate(torch.arange(8.0).reshape(1, 1, 1, 8)).flatten()
    return rotated


@pytest.mark.parametrize("model_type", sorted(KNOWN_MODEL_TYPES))
def test_model_types_taken_as_known_rotate_halves(model_type: str) -> None:
    assert rotate_half_of(model_type).tolist() == [-4.0, -5.0, -6.0, -7.0, 0.0, 1.0, 2.0, 3.0]


# Left out: complex numbers (deepseek_v2, llama4), a rotation inside a class (roformer), code outside transformers (chatglm).
@pytest.mark.parametrize("model_type", sorted(INTERLEAVED_MODEL_TYPES - {"chatglm", "deepseek_v2", "llama4", "llama4_text", "roformer"}))
def test_model_types_refused_as_interleaved_rotate_neighbours(model_type: str) -> None:
    assert rotate_half_of(model_type).tolist() == [-1.0, 0.0, -3.0, 2.0, -5.0, 4.0, -7.0, 6.0]
