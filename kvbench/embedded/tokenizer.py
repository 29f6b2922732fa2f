"""The word-level tokenizer that all embedded models share."""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvbench.embedded.world import ATTRIBUTES, MEETINGS, OPENINGS, entities

SPECIAL_TOKENS: tuple[str, ...] = ("<pad>", "<s>", "</s>", "<unk>")
SPACE = "▁"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}Answer: {{ message['content'] }}\n\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def vocabulary() -> list[str]:
    """Every token, in the order of its id: special, marks, digits, words, entities."""
    templates = [*OPENINGS, *MEETINGS, "Question Answer What is plus it It"]
    for attribute in ATTRIBUTES:
        templates += [*attribute.statements, *attribute.questions, " ".join(attribute.values)]
    words = sorted({word for text in templates for word in re.findall(r"[A-Za-z]+", re.sub(r"\{\w\}", " ", text))})
    digits = [str(digit) for digit in range(10)]
    names = sorted(entities())
    return [*SPECIAL_TOKENS, "\n", SPACE, ".", "?", ":", ",", *digits, *(SPACE + token for token in (*digits, *words, *names))]


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer in Hugging Face form.

    A word is one token that carries the space before it, also at the start of a text or line, where no space is written. So
    `encode(context + " " + answer)` is `encode(context) + encode(" " + answer)`. It adds no special tokens of its own accord.

    Args:
        max_length: Tokens that the models take.

    Returns:
        A tokenizer with `<s>`, `</s>`, `<pad>`, `<unk>` and a chat template of `Question:` and `Answer:` lines.
    """
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary())}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [
            # "Answer:red" is what a chat template and a bare answer make together
            normalizers.Replace(Regex(r"(?<=[:,.?])(?=[A-Za-z0-9])"), " "),
            normalizers.Replace(Regex(r"(?:(?<=\n)|\A)(?=[^\s])"), " "),
            normalizers.Replace(" ", SPACE),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"\n|{SPACE}?[A-Za-z]+|{SPACE}?[0-9]|{SPACE}|[^A-Za-z0-9{SPACE}\n]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(SPACE, " "), decoders.Replace("\n ", "\n"), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
