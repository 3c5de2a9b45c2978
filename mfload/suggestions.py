"""Help for who mistypes a name: the names that look like it."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping

_SOUGHT = 5000
_LONG = 300


def close(word: object, choices: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """The choices most like a word, the likest first.

    Likeness takes about 50 µs a choice: the first 5000 are looked at, and the first 300
    characters of each, so that whoever mistypes one does not wait.

    Args:
        word: What was typed; anything, by its text.
        choices: What could have been meant.
        most: How many to give.
        cutoff: How like the word they must be, 0 to 1.
    """
    wanted = str(word)[:_LONG]
    among = {
        choice[:_LONG].lower(): choice[:_LONG] for choice in itertools.islice(choices, _SOUGHT)
    }
    found = difflib.get_close_matches(wanted.lower(), among, n=most, cutoff=cutoff)
    return [among[each] for each in found]


def meant(word: object, choices: Iterable[str] | Mapping[str, str]) -> str:
    """`, did you mean 'x'?`, to be put after a message; empty where nothing is close.

    Args:
        word: What was typed.
        choices: What could have been meant; where it is a mapping, its value is named.
    """
    found = close(word, choices, 1)
    if not found:
        return ""
    named = choices[found[0]] if isinstance(choices, Mapping) else found[0]
    return f", did you mean {named!r}?"
