"""Items that carry their token ids beside their text, so that what is scored does not depend on tokenising the text again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvbench.errors import BadInputError


def carried_tokens(doc: object, context: str, *, fingerprint: Callable[[], str], max_length: int) -> tuple[list[int], list[int]] | None:
    """The token ids of a log-likelihood request, if its document carries them.

    Args:
        doc: lm-eval's document; carries them as `context_ids` and `continuation_ids`, with the `tokenizer` fingerprint they belong to.
        context: the request's context as text.
        fingerprint: gives `tokenizer_fingerprint` of the model that scores; called only where it is needed.
        max_length: positions of the model.

    Returns:
        (context ids, continuation ids), or None where the document carries none and its text is to be tokenised.

    Raises:
        BadInputError: the ids are another tokenizer's, do not fit the model, or the text was changed around them.
    """
    if not isinstance(doc, Mapping) or not {"context_ids", "continuation_ids", "tokenizer"} <= doc.keys():
        return None
    before, scored = list(doc["context_ids"]), list(doc["continuation_ids"])
    if context != doc["context"]:
        raise BadInputError(
            "prefix perplexity is defined on raw text, but a chat template, a system instruction or few-shot examples were put around it; "
            "run this task (wikitext2_prefix) without them"
        )
    if doc["tokenizer"] != fingerprint():
        raise BadInputError(
            f"the items were cut with another tokenizer (fingerprint {str(doc['tokenizer'])[:12]}) than the model's ({fingerprint()[:12]}); "
            "name the model itself in the task's metadata (pretrained=...)"
        )
    # The last token is scored, not read.
    if len(before) + len(scored) - 1 > max_length:
        raise BadInputError(
            f"an item has {len(before) + len(scored)} tokens, but the model takes {max_length}; give --metadata '{{\"prefix_tokens\": {max_length // 2}}}' or less"
        )
    return before, scored
