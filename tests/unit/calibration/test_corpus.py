"""Where text comes from and how fit and held-out parts stay apart."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvbench.calibration.corpus import end_of_text_id, load_texts, pack
from kvbench.errors import BadInputError


class Letters:
    """One token per character; token 0 ends a text."""

    eos_token_id = 0

    def get_vocab(self):
        return {"<|endoftext|>": 0}

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]


DOCUMENTS = [chr(97 + i) * 7 for i in range(26)]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_no_document_is_in_both_parts(seed):
    blocks = pack(DOCUMENTS, Letters(), sequences=3, heldout=2, seq_len=10, seed=seed)
    assert blocks.fit.shape == (3, 10)
    assert blocks.heldout.shape == (2, 10)
    fit, heldout = set(blocks.fit.ravel()) - {0}, set(blocks.heldout.ravel()) - {0}
    assert not fit & heldout
    assert blocks.fit_documents == len(fit) == 4


def test_packing_in_file_order_by_hand():
    blocks = pack(["abc", "de", "fghi"], Letters(), sequences=1, heldout=1, seq_len=4, seed=None)
    assert blocks.fit.tolist() == [[97, 98, 99, 0]]
    assert blocks.heldout.tolist() == [[100, 101, 0, 102]]


def test_fingerprint_knows_every_token_and_the_split():
    a = pack(DOCUMENTS, Letters(), sequences=3, heldout=2, seq_len=10, seed=0)
    assert a.fingerprint() == pack(DOCUMENTS, Letters(), sequences=3, heldout=2, seq_len=10, seed=0).fingerprint()
    assert a.fingerprint() != pack(DOCUMENTS, Letters(), sequences=3, heldout=2, seq_len=10, seed=1).fingerprint()
    changed = type(a)(a.fit.copy(), a.heldout, 1, 1)
    changed.fit[0, 0] += 1
    assert changed.fingerprint() != a.fingerprint()
    assert type(a)(np.concatenate([a.fit, a.heldout[:1]]), a.heldout[1:], 1, 1).fingerprint() != a.fingerprint()


def test_the_larger_calibration_contains_the_smaller():
    small = pack(DOCUMENTS, Letters(), sequences=2, heldout=1, seq_len=10, seed=3)
    large = pack(DOCUMENTS, Letters(), sequences=6, heldout=1, seq_len=10, seed=3)
    assert large.fit[:2].tolist() == small.fit.tolist()


def test_too_little_text_says_how_much_there_is():
    with pytest.raises(BadInputError, match=r"held-out part needs 5 sequences of 40 tokens, but only 3"):
        pack(DOCUMENTS, Letters(), sequences=2, heldout=5, seq_len=40, seed=None)


@pytest.mark.parametrize("name", ["sequences", "heldout", "seq_len"])
def test_sizes_must_be_positive(name):
    sizes = {"sequences": 1, "heldout": 1, "seq_len": 4, name: 0}
    with pytest.raises(BadInputError, match="at least 1"):
        pack(DOCUMENTS, Letters(), seed=None, **sizes)


def test_end_of_text_prefers_the_document_separator_over_the_end_of_a_turn():
    class Chat(Letters):
        eos_token_id = 2

    assert end_of_text_id(Chat()) == 0


def test_files(tmp_path):
    rows = [{"text": "one", "other": "x"}, {"text": "two", "other": "y"}]
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert load_texts(str(jsonl)) == ["one", "two"]
    assert load_texts(f"{jsonl}:other") == ["x", "y"]
    import pandas as pd

    parquet = tmp_path / "a.parquet"
    pd.DataFrame(rows).to_parquet(parquet)
    assert load_texts(str(parquet)) == ["one", "two"]
    text = tmp_path / "a.txt"
    text.write_text("first\nstill first\n\n\nsecond\n")
    assert load_texts(str(text)) == ["first\nstill first", "second\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", '{"text": ""}\n', "no text in it"),
        ("a.jsonl", '{"text": "x"}\nnot json\n', "line 2: not JSON"),
        ("a.jsonl", '["x"]\n', "line 1: a list"),
        ("a.jsonl", '{"body": "x"}\n', "none of the columns"),
        ("a.jsonl", '{"text": 3}\n', "row 1: column 'text' holds int"),
        ("a.txt", "", "no text in it"),
        ("a.parquet", "nonsense", "not a parquet file"),
        ("a.csv", "text\nx\n", "suffix '.csv'"),
    ],
)
def test_unusable_files_say_what_is_wrong(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(BadInputError, match=message):
        load_texts(str(path))


def test_missing_file_and_missing_column(tmp_path):
    with pytest.raises(BadInputError, match="does not exist"):
        load_texts(str(tmp_path / "nothing.jsonl"))
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(BadInputError, match="no column 'body'"):
        load_texts(f"{path}:body")
