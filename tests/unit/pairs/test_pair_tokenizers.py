"""Tokenizer identity and the fingerprints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pair_models import SaveModel, byte_tokenizer, byte_vocabulary, llama
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from kvbench.pairs.check import CheckRow, check_pair
from kvbench.pairs.tokenizers import PROBES, compare_vocabularies, config_fingerprint, first_probe_difference, tokenizer_fingerprint


def rows_of(
    save_model: SaveModel, source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast, tables: tuple[int, int] = (320, 320)
) -> dict[str, CheckRow]:
    folders = save_model(llama(vocab_size=tables[0]), source, "source"), save_model(llama(vocab_size=tables[1]), target, "target")
    return {row.name: row for row in check_pair(*folders).rows}


def shuffled_vocabulary() -> dict[str, int]:
    vocabulary = byte_vocabulary()
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return vocabulary


def test_same_tokenizer_is_ok(save_model: SaveModel) -> None:
    rows = rows_of(save_model, byte_tokenizer(), byte_tokenizer())
    names = ("tokenizer vocabulary", "special tokens", "tokenizer probes", "embedding rows")
    assert [rows[name].status for name in names] == ["ok"] * 4


def test_shuffled_vocabulary_is_refused_with_the_first_moved_tokens(save_model: SaveModel) -> None:
    rows = rows_of(save_model, byte_tokenizer(), byte_tokenizer(shuffled_vocabulary()))
    first, second = byte_vocabulary()["a"], byte_vocabulary()["b"]
    assert rows["tokenizer vocabulary"].status == "refuse"
    assert rows["tokenizer vocabulary"].detail.startswith(
        f"2 tokens have unequal ids: 'a' is {first} in the source and {second} in the target; 'b' is"
    )
    assert rows["tokenizer probes"].status == "refuse"


def test_probes_catch_what_equal_vocabularies_hide(save_model: SaveModel) -> None:
    source, target = byte_tokenizer(), byte_tokenizer(digits=True)
    assert compare_vocabularies(source, target).identical
    rows = rows_of(save_model, source, target)
    assert rows["tokenizer vocabulary"].status == "ok"
    row = rows["tokenizer probes"]
    assert (row.status, row.codes) == ("refuse", ("probe-set",))
    # Only numbers tell them apart: "12" is one token here and two there.
    difference = first_probe_difference(source, target)
    assert difference is not None
    assert difference.text == "0 1 12 123 1234 12345 3.14159 1,000,000 1e-10 0x7f"
    assert repr(difference.text) in row.detail
    assert str(list(difference.source_ids)) in row.detail
    assert str(list(difference.target_ids)) in row.detail
    assert "'12'" in row.detail
    assert "12" not in difference.target_tokens


def test_probes_catch_a_token_that_one_side_puts_in_front(save_model: SaveModel) -> None:
    rows = rows_of(save_model, byte_tokenizer(bos=True), byte_tokenizer())
    assert rows["tokenizer probes"].status == "refuse"
    assert f"{len(PROBES)} of {len(PROBES)} probe texts" in rows["tokenizer probes"].detail


def test_probes_cover_what_tokenizers_do_differently() -> None:
    text = "\n".join(PROBES)
    for needle in ("  ", "\t", "\r\n", "<|im_start|>", "[INST]", "<|start_header_id|>", "def ", "123", "🙂", "ש", "م", "日", "\u200b", "e\u0301"):
        assert needle in text
    assert "" in PROBES
    assert any(probe.startswith(" ") for probe in PROBES)
    assert any(len(probe) > 40 and " " not in probe for probe in PROBES)
    assert len(set(PROBES)) == len(PROBES)


@pytest.mark.parametrize("longer", ["source", "target"])
def test_appended_tokens_warn_if_both_embedding_tables_have_rows(longer: str, save_model: SaveModel) -> None:
    more, less = byte_tokenizer(added=("<extra_1>", "<extra_2>")), byte_tokenizer()
    pair = (more, less) if longer == "source" else (less, more)
    row = rows_of(save_model, *pair, tables=(320, 384))["tokenizer vocabulary"]
    assert (row.status, row.codes) == ("warn", ("vocabulary-extra",))
    assert "2 tokens more behind 266 common ones: '<extra_1>' (266), '<extra_2>' (267)" in row.detail


def test_appended_tokens_beyond_an_embedding_table_are_refused(save_model: SaveModel) -> None:
    rows = rows_of(save_model, byte_tokenizer(added=("<extra>",)), byte_tokenizer(), tables=(320, 266))
    assert rows["tokenizer vocabulary"].status == "refuse"
    assert "beyond an embedding table: '<extra>' (266)" in rows["tokenizer vocabulary"].detail


def test_tokens_missing_among_the_common_ones_are_refused(save_model: SaveModel) -> None:
    gap = {("gap" if token == "!" else token): index for token, index in byte_vocabulary().items()}
    row = rows_of(save_model, byte_tokenizer(), byte_tokenizer(gap))["tokenizer vocabulary"]
    assert row.status == "refuse"
    assert "among the common ones" in row.detail


def test_embedding_rows_padding_is_ok_and_missing_rows_warn(save_model: SaveModel) -> None:
    row = rows_of(save_model, byte_tokenizer(), byte_tokenizer(), tables=(266, 384))["embedding rows"]
    assert (row.status, row.source, row.target) == ("ok", "266 rows", "384 rows")
    assert "Padding only" in row.detail
    row = rows_of(save_model, byte_tokenizer(), byte_tokenizer(), tables=(200, 320))["embedding rows"]
    assert (row.status, row.codes) == ("warn", ("embedding-rows",))
    assert "source (highest id 265, 200 rows)" in row.detail


def test_pad_token_may_differ_and_others_may_not(save_model: SaveModel) -> None:
    row = rows_of(save_model, byte_tokenizer(), byte_tokenizer(special={"pad_token": "</s>"}))["special tokens"]
    assert (row.status, row.source, row.target) == ("warn", "bos 0, eos 1, unk 2, pad 3", "bos 0, eos 1, unk 2, pad 1")
    row = rows_of(save_model, byte_tokenizer(), byte_tokenizer(special={"eos_token": "<s>"}))["special tokens"]
    assert (row.status, row.codes) == ("refuse", ("special-ids",))
    assert "ids of eos differ" in row.detail
    row = rows_of(save_model, byte_tokenizer(), byte_tokenizer(special={"bos_token": "</s>", "pad_token": "</s>"}))["special tokens"]
    assert row.status == "refuse"
    assert "ids of bos, pad differ" in row.detail


def test_tokenizer_fingerprint_ignores_padding_truncation_and_the_pad_token() -> None:
    plain, used = byte_tokenizer(), byte_tokenizer()
    used.pad_token = used.eos_token
    used.padding_side = "left"
    used(["a", "a longer text"], padding=True, truncation=True, max_length=4)
    used.chat_template = "{{ messages }}"
    assert used.backend_tokenizer.padding is not None
    assert tokenizer_fingerprint(used) == tokenizer_fingerprint(plain)


@pytest.mark.parametrize(
    "other",
    [
        lambda: byte_tokenizer(digits=True),
        lambda: byte_tokenizer(bos=True),
        lambda: byte_tokenizer(added=("<extra>",)),
        lambda: byte_tokenizer(special={"eos_token": "<s>"}),
        lambda: byte_tokenizer(shuffled_vocabulary()),
    ],
    ids=["pre-tokenizer", "post-processor", "added", "eos", "ids"],
)
def test_tokenizer_fingerprint_sees_every_difference(other: Callable[[], PreTrainedTokenizerFast]) -> None:
    assert tokenizer_fingerprint(other()) != tokenizer_fingerprint(byte_tokenizer())


def test_config_fingerprint_ignores_what_changes_no_key_or_value() -> None:
    plain = config_fingerprint(llama())
    irrelevant: dict[str, Any] = {
        "dtype": "bfloat16",
        "use_cache": False,
        "bos_token_id": 7,
        "attention_dropout": 0.1,
        "architectures": ["X"],
        "new_setting": None,
    }
    for name, value in irrelevant.items():
        assert config_fingerprint(llama(**{name: value})) == plain, name
    named = llama()
    named._name_or_path, named.transformers_version = "elsewhere", "9.9"
    assert config_fingerprint(named) == plain


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 4},
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        {"attention_bias": True},
        {"head_dim": 8},
    ],
    ids=["layers", "norm", "theta", "bias", "head"],
)
def test_config_fingerprint_sees_what_changes_keys_and_values(settings: dict[str, Any]) -> None:
    assert config_fingerprint(llama(**settings)) != config_fingerprint(llama())


def test_fingerprints_are_the_same_in_another_process_and_from_disk(save_model: SaveModel) -> None:
    folder = save_model()
    code = (
        "import sys; from transformers import AutoConfig, AutoTokenizer; from kvbench.pairs.tokenizers import *; "
        "print(config_fingerprint(AutoConfig.from_pretrained(sys.argv[1])), tokenizer_fingerprint(AutoTokenizer.from_pretrained(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [config_fingerprint(llama()), tokenizer_fingerprint(AutoTokenizer.from_pretrained(folder))]
    assert config_fingerprint(AutoConfig.from_pretrained(folder)) == config_fingerprint(llama())
