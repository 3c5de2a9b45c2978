"""Names like the one that was typed, for the end of an error. Better none than one that misleads.

Names are compared by their words: `model.layers.0.q_proj` has model, layers, q and proj. A name is
near if it has all words of the other, in order and few more, each but for a slip of the keyboard,
and the same numbers; the last word of a dotted name (weight, bias) is never left out.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence

# Limits that keep a mistyped name from costing a wait: choices, and characters of a name and word.
_COMPARED = 5000
_LONGEST = 300
_WORD = 32

_LEAST = 0.6  # The share of words that two names have in common.
_PREFIX = 3  # Letters that say how a name begins.
_PARTS = re.compile(r"(?P<word>[^\W\d_]+)|\d+")


def close(typed: object, choices: Iterable[str], most: int) -> list[str]:
    """The choices that are near, the nearest first."""
    name = str(typed)[:_LONGEST]
    first = itertools.islice(choices, _COMPARED)
    found = [(likeness(name, each), each[:_LONGEST]) for each in dict.fromkeys(first)]
    near = sorted((pair for pair in found if pair[0]), key=lambda pair: pair[0], reverse=True)
    # Beside a name of the same words, one with fewer or more is another tensor.
    whole = [each for (_, share), each in near if share == 1.0]
    return (whole or [each for _, each in near])[:most]


def likeness(typed: str, choice: str) -> tuple[float, ...]:
    """How well the words that two names have in common agree, and their share; () if far."""
    typed, choice = typed.lower(), choice[:_LONGEST].lower()
    dotted = "." in choice or "/" in choice
    begins = not dotted and len(typed) >= _PREFIX and choice.startswith(typed)
    (numbers, words), (other_numbers, other_words) = _taken_apart(typed), _taken_apart(choice)
    # 61 for 16 is a slip, and layer 61 is another than layer 16.
    slip = not dotted and sorted("".join(numbers)) == sorted("".join(other_numbers))
    if not (numbers == other_numbers or begins or slip):
        return ()
    if begins or "".join(words) == "".join(other_words) != "":
        return 1.0, 1.0
    if dotted and words and other_words and not _agreement(words[-1], other_words[-1]):
        return ()
    agreed = _in_order(*sorted((words, other_words), key=len))
    share = 2 * len(agreed) / max(1, len(words) + len(other_words))
    return (sum(agreed) / len(agreed), share) if share >= _LEAST else ()


@functools.lru_cache(256)
def _taken_apart(name: str) -> tuple[list[str], list[str]]:
    """The numbers and the words of a name."""
    found = list(_PARTS.finditer(name))
    numbers = [each[0] for each in found if not each["word"]]
    return numbers, [each[0] for each in found if each["word"]]


def _in_order(few: Sequence[str], many: Sequence[str]) -> list[float]:
    """How well each of a few words agrees with one of many, in order; none if one does not."""
    rest, agreed = iter(many), list[float]()
    for word in few:
        best = next((found for each in rest if (found := _agreement(word, each))), 0.0)
        if not best:
            return []
        agreed.append(best)
    return agreed


@functools.lru_cache(4096)
def _agreement(word: str, other: str) -> float:
    """1.0 for the same word, less for a slip in every four letters; 0.0 for another word."""
    if word == other:
        return 1.0
    longer = max(len(word), len(other))
    most = longer // 4
    if longer > _WORD or abs(len(word) - len(other)) > most:
        return 0.0
    slips = _slips(word, other)
    return 1 - slips / longer if slips <= most else 0.0


def _slips(word: str, other: str) -> int:
    """Letters to insert, leave out, replace, or swap with the next (optimal string alignment)."""
    before, row = list[int](), list(range(len(other) + 1))
    for n, letter in enumerate(word):
        last, before, row = before, row, [n + 1]
        for m, its in enumerate(other):
            least = min(row[m] + 1, before[m + 1] + 1, before[m] + (letter != its))
            if n and m and letter == other[m - 1] and word[n - 1] == its:
                least = min(least, last[m - 1] + 1)
            row.append(least)
    return row[-1]
