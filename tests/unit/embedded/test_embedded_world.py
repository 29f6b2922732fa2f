"""The generator: the same world in every process, held-out items kept apart from training."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import islice, pairwise

import pytest

from kvbench.embedded.corpus import calibration_texts, document_stream
from kvbench.embedded.items import choice_items, prefix_items, sum_items, turn_items
from kvbench.embedded.world import ATTRIBUTES, ENTITY_COUNT, entities, facts, sum_question, sums

FINGERPRINT = """
import hashlib, json
from itertools import islice
from kvbench.embedded.corpus import calibration_texts, document_stream
from kvbench.embedded.items import choice_items, prefix_items, sum_items, turn_items
items = [choice_items(50, 0), sum_items(50, 0), prefix_items(20, 0), turn_items(10, 0)]
everything = [list(islice(document_stream(1), 300)), calibration_texts(0, 100), items]
print(hashlib.sha256(json.dumps(everything).encode()).hexdigest())
"""


def fingerprint(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", FINGERPRINT], env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_same_in_every_process() -> None:
    assert fingerprint("1") == fingerprint("2")


def test_seeds_differ() -> None:
    assert calibration_texts(0, 20) != calibration_texts(1, 20)
    assert calibration_texts(0, 20) == calibration_texts(0, 30)[:20]
    assert choice_items(20, 0) != choice_items(20, 1)


def test_world_has_the_promised_size() -> None:
    assert len(set(entities())) == ENTITY_COUNT == 240
    assert len(facts()) == 1200
    for number, attribute in enumerate(ATTRIBUTES):
        counts = [sum(fact.value == value for fact in facts() if fact.attribute == number) for value in attribute.values]
        assert counts == [30] * 8, attribute.name  # 240 entities over 8 values, so that guessing is no better than chance


def test_training_never_asks_what_evaluation_asks() -> None:
    text = "\n".join(islice(document_stream(1), 30_000))
    asked = {line.removeprefix("Question: ") for line in text.splitlines() if line.startswith("Question: ")}
    held_out = {fact.question(fact.held_out_phrasing) for fact in facts()}
    others = {fact.question(p) for fact in facts() for p in range(4)} - held_out
    assert len(held_out) == 1200
    assert not asked & held_out
    assert len(asked & others) > 0.99 * len(others)  # so the check above looks at enough text
    sums_held_out = {sum_question(a, b) for a, b in sums()[1]}
    assert not asked & sums_held_out
    assert len({f"{a} plus {b} is" for a, b in sums()[1] if f" {a} plus {b} is " in text}) == 0


def test_choices_hold_the_answer_once() -> None:
    for item in [*choice_items(280, 0), *turn_items(60, 0)]:
        assert len(set(item["choices"])) == 4
        assert 0 <= item["gold"] < 4
    golds = [item["gold"] for item in choice_items(280, 0)[:240]]
    assert max(golds.count(place) for place in range(4)) < 90  # binomial(240, 1/4) exceeds 89 with p < 1e-4


def test_turns_carry_the_true_history() -> None:
    items = turn_items(conversations=3, seed=5, turns=4)
    assert [(item["conversation"], item["turn"]) for item in items] == [(c, t) for c in range(3) for t in range(4)]
    for before, after in pairwise(items):
        if after["turn"]:
            assert after["context"].startswith(f"{before['context']} {before['choices'][before['gold']]}\nQuestion: ")


def test_sums_are_right() -> None:
    for item in sum_items(120, 0):
        words = item["context"].split()
        assert int(words[3]) + int(words[5].rstrip("?")) == int(item["answer"])


@pytest.mark.parametrize("item", prefix_items(20, 0))
def test_prefix_items_cut_at_a_sentence(item: dict[str, object]) -> None:
    assert str(item["context"]).endswith(".")
    assert str(item["continuation"]).startswith(" ")


def test_calibration_texts_are_not_training_texts() -> None:
    training = {hashlib.sha256(text.encode()).hexdigest() for text in islice(document_stream(1), 5000) if len(text) > 200}
    assert not [text for text in calibration_texts(0, 1000) if len(text) > 200 and hashlib.sha256(text.encode()).hexdigest() in training]
