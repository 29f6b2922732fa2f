"""Contexts into batches: shared headers found, lengths alike, work bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


# A group of its own means a header pass and batches of its own; below this many tokens saved that costs more than it spares.
WORTHWHILE_TOKENS = 512
ALIKE = 0.85
BUSY_TOKENS = 128


@dataclass(frozen=True)
class Batch:
    """Contexts that are run together.

    Attributes:
        header: tokens that all of them start with, prefilled once (empty: none).
        members: indices into the list of prefixes.
    """

    header: Tokens
    members: tuple[int, ...]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common start of two token sequences."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low


def find_headers(prefixes: Sequence[Tokens], shortest: int) -> list[tuple[int, list[int]]]:
    """Group prefixes that start alike.

    Prefixes are sorted; a neighbour joins the open group while the tokens saved, (members - 1) * common length, do not fall.

    Args:
        prefixes: token sequences.
        shortest: headers below this length are not worth a pass of their own.

    Returns:
        (header length, member indices) per group; length 0 collects everything that shares nothing.
    """
    order = sorted(range(len(prefixes)), key=lambda i: prefixes[i])
    groups: list[tuple[int, list[int]]] = []
    alone: list[int] = []
    current: list[int] = []
    common = 0

    def close() -> None:
        if (len(current) - 1) * common >= WORTHWHILE_TOKENS and common >= shortest:
            groups.append((common, list(current)))
        else:
            alone.extend(current)

    for index in order:
        if not current:
            current, common = [index], len(prefixes[index])
            continue
        shared = min(common, common_length(prefixes[current[-1]], prefixes[index]))
        saved_now, saved_then = (len(current) - 1) * common, len(current) * shared
        if shared >= shortest and saved_then >= saved_now:
            current.append(index)
            common = shared
        else:
            close()
            current, common = [index], len(prefixes[index])
    close()
    if alone:
        groups.append((0, alone))
    return groups


def cut(lengths: Sequence[int], most: int, copies: int = 1) -> list[int]:
    """Sizes of consecutive batches of rows so alike in length that padding costs little.

    A batch ends where the next row is clearly shorter than the batch's longest, once it holds enough tokens to keep the matrix
    products busy.

    Args:
        lengths: tokens per row, longest first.
        most: rows per batch at most.
        copies: how often each row is run (arms).
    """
    sizes: list[int] = []
    start = 0
    while start < len(lengths):
        longest, size = lengths[start], 1
        while (
            start + size < len(lengths) and size < most and not (lengths[start + size] < ALIKE * longest and size * longest * copies >= BUSY_TOKENS)
        ):
            size += 1
        sizes.append(size)
        start += size
    return sizes


def plan_batches(
    prefixes: Sequence[Tokens],
    query_tokens: Sequence[int],
    *,
    batch_size: int,
    token_budget: int,
    arms: int,
    share_headers: bool,
    shortest_header: int = 32,
) -> list[Batch]:
    """Cut prefixes into batches of similar length.

    Args:
        prefixes: tokens whose cache is transferred.
        query_tokens: for each prefix the tokens that will be run behind it.
        batch_size: contexts per batch at most.
        token_budget: padded tokens (prefix and queries, all arms) per batch at most.
        arms: rows per context.
        share_headers: find shared headers at all.
        shortest_header: see `find_headers`.
    """
    groups = find_headers(prefixes, shortest_header) if share_headers else [(0, list(range(len(prefixes))))]
    batches = []
    for header, members in groups:
        # Longest first: the first batch is the largest, so memory trouble shows at once; equal prefixes keep equal queries together.
        members = sorted(members, key=lambda i: (-len(prefixes[i]), -query_tokens[i], i))
        start = 0
        while start < len(members):
            length = len(prefixes[members[start]])
            count, widest = 0, 0
            while start + count < len(members) and count < batch_size:
                widest = max(widest, query_tokens[members[start + count]])
                if count and (count + 1) * arms * (length + widest) > token_budget:
                    break
                count += 1
            chosen = tuple(members[start : start + count])
            batches.append(Batch(tuple(prefixes[chosen[0]][:header]), chosen))
            start += count
    return batches
