"""The tokenizer: readable round trips, and contexts that split cleanly from their answers."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from kvbench.embedded.corpus import calibration_texts
from kvbench.embedded.items import choice_items, prefix_items, sum_items, token_count, turn_items
from kvbench.embedded.tokenizer import build_tokenizer, vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(1024)


def test_vocabulary_is_small_and_unique() -> None:
    assert len(set(vocabulary())) == len(vocabulary()) < 400


def test_round_trip_without_unknown_words(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in calibration_texts(3, 500):
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert len(ids) == token_count(text)


def test_clean_split_at_the_space(tokenizer: PreTrainedTokenizerFast) -> None:
    pairs = [(item["context"], " " + choice) for item in [*choice_items(100, 0), *turn_items(20, 0)] for choice in item["choices"]]
    pairs += [(item["context"], " " + item["answer"]) for item in sum_items(50, 0)]
    pairs += [(item["context"], item["continuation"]) for item in prefix_items(64, 0)]
    for context, continuation in pairs:
        assert tokenizer.encode(context + continuation) == tokenizer.encode(context) + tokenizer.encode(continuation)


def test_answers_are_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for item in choice_items(200, 0):
        assert [len(tokenizer.encode(" " + choice)) for choice in item["choices"]] == [1, 1, 1, 1]


def test_prefix_token_counts_are_the_tokenizers(tokenizer: PreTrainedTokenizerFast) -> None:
    for item in prefix_items(64, 0):
        assert item["tokens"] == len(tokenizer.encode(item["continuation"]))


def test_adds_no_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("red") == tokenizer.encode("red", add_special_tokens=False) == tokenizer.encode(" red")


def test_unknown_word_is_one_unknown_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("xylophone") == [tokenizer.unk_token_id]


def test_chat_template_makes_the_prompt_of_the_tasks(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": "What is 3 plus 4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "What is 1 plus 1?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "Question: What is 3 plus 4?\nAnswer: 7\n\nQuestion: What is 1 plus 1?\nAnswer:"
    assert tokenizer.encode(text + "2") == tokenizer.encode(text + " 2")
