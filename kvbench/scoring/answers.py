"""How a short free answer is scored against gold answers: SQuAD's normalisation, exact match, token F1, CoQA's rule for several golds.

Source: Rajpurkar et al., SQuAD (arXiv:1606.05250), section 6.1; Reddy et al., CoQA (arXiv:1808.07042), section 5.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerScores(NamedTuple):
    """Score of one answer, each between 0 and 1."""

    f1: float
    """Token F1."""
    exact_match: float
    """Whether the normalised answers are equal."""


def normalised(answer: str) -> str:
    """Lower case, without ASCII punctuation, the articles a, an, the, and extra blanks."""
    bare = answer.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(gold: str, answer: str) -> float:
    """1 if both are equal once normalised, else 0."""
    return float(normalised(gold) == normalised(answer))


def token_f1(gold: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalised tokens; where one side has no token, 1 if neither has, else 0."""
    wanted, given = normalised(gold).split(), normalised(answer).split()
    if not wanted or not given:
        return float(wanted == given)
    common = sum((Counter(wanted) & Counter(given)).values())
    # 2 P R / (P + R) with P = common / given, R = common / wanted.
    return 2 * common / (len(wanted) + len(given))


def answer_scores(golds: Sequence[str], answer: str) -> AnswerScores:
    """Score one answer against all gold answers of a question.

    With several golds each is left out in turn, the best of the others is taken, and the results are averaged, so that the
    figure is comparable with that of a human, who is scored against the other annotators.

    Args:
        golds: at least one.
        answer: what was answered.
    """
    return AnswerScores(_left_out(golds, answer, token_f1), _left_out(golds, answer, exact_match))


def _left_out(golds: Sequence[str], answer: str, score: Callable[[str, str], float]) -> float:
    scores = [score(gold, answer) for gold in golds]
    if len(scores) == 1:
        return scores[0]
    return sum(max(scores[:i] + scores[i + 1 :]) for i in range(len(scores))) / len(scores)
