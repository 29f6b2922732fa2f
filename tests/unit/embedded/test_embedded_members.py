"""The shipped models: found by name, small, of one geometry, and knowing their world."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvbench.embedded import MEMBERS, member_path
from kvbench.embedded.items import choice_items
from kvbench.errors import BadInputError


def test_unknown_member_lists_the_known() -> None:
    with pytest.raises(BadInputError, match=r"no embedded model 'tarbet'; there are embedded:source, embedded:target, embedded:stranger"):
        member_path("tarbet")


@pytest.mark.parametrize("name", ["", "../models/target", "models"])
def test_a_path_is_not_a_member(name: str) -> None:
    with pytest.raises(BadInputError):
        member_path(name)


def test_import_is_light() -> None:
    code = "import sys, kvbench.embedded, kvbench.embedded.items; print(any(m in sys.modules for m in ('torch', 'transformers', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "False"


def test_all_together_under_ten_megabytes() -> None:
    assert sum(file.stat().st_size for name in MEMBERS for file in member_path(name).rglob("*") if file.is_file()) < 10e6


def test_one_geometry_and_one_tokenizer() -> None:
    configs = [json.loads((member_path(name) / "config.json").read_text()) for name in MEMBERS]
    for key in ("num_key_value_heads", "head_dim", "rope_parameters", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id"):
        assert configs[0][key] == configs[1][key] == configs[2][key], key
    assert len({config["num_hidden_layers"] for config in configs[:2]}) == 2
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(member_path(name) / file).read_bytes() for name in MEMBERS}) == 1, file


def test_stored_tokenizer_is_the_one_the_code_builds() -> None:
    from transformers import AutoTokenizer

    from kvbench.embedded.tokenizer import build_tokenizer

    stored, built = AutoTokenizer.from_pretrained(member_path("target")), build_tokenizer(1024)
    assert stored.get_vocab() == built.get_vocab()
    text = choice_items(1, 9)[0]["context"]
    assert stored.encode(text) == built.encode(text)
    assert stored.decode(stored.encode(text)) == text


def accuracy(name: str, count: int) -> float:
    """Share of four-way questions answered right, by one plain forward pass each."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(member_path(name))
    model = AutoModelForCausalLM.from_pretrained(member_path(name), dtype=torch.float32).eval()
    right = 0
    for item in choice_items(count, 7):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(item["context"])])).logits[0, -1]
        scores = [float(logits[tokenizer.encode(" " + choice)[0]]) for choice in item["choices"]]
        right += scores.index(max(scores)) == item["gold"]
    return right / count


def test_target_and_stranger_know_the_world_and_source_less() -> None:
    scores = {name: accuracy(name, 120) for name in MEMBERS}
    assert scores["target"] > 0.9
    assert scores["stranger"] > 0.9
    # chance is 0.25, and 0.4 is more than three standard errors above it at n = 120
    assert 0.4 < scores["source"] < scores["target"] - 0.15
