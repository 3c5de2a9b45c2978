"""Lookup: which rules a name meets, quickly, as checkpoints have up to 100,000 of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mfload.trees.keymaps import Entry

Expand = Callable[[re.Match[str]], str]

_TAIL = 16  # Characters at the end of a name by which rules are sorted out.
_LITERAL_END = re.compile(r"(?:[A-Za-z0-9_]|\\\.)*\Z")
_REFERENCE = re.compile(r"\\g<(\w+)>|\\([1-9][0-9]?)(?![0-9])")


class Lookup:
    """The rules of a key map, ready to be asked for names."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._patterns = [entry.pattern for entry in entries]
        self._fills = [bool(entry.rules) for entry in entries]
        self._family = [at for at, entry in enumerate(entries) if entry.family]
        self._endings = [ending(pattern)[-_TAIL:] for pattern in self._patterns]
        self._candidates: dict[str, list[int]] = {}

    def matching(self, name: str) -> list[tuple[int, re.Match[str]]]:
        r"""The lines for a name: those that match all of it.

        Where there are none, lines in the forms of Tunix and Bonsai may match its front: these
        replace what matched, and the rest of the name stays. So `head\.weight` is no second match
        for `head.weight_scale` where there is a line for that. What leaves tensors out comes
        last, and so may leave out all the rest.

        Returns:
            The number of each line, and what it matched.
        """
        patterns = self._patterns
        whole = ((at, patterns[at].fullmatch(name)) for at in self._likely(name))
        found = [(at, match) for at, match in whole if match]
        filling = [(at, match) for at, match in found if self._fills[at]]
        if filling:
            return filling
        fronts = ((at, patterns[at].match(name)) for at in self._family)
        return [(at, match) for at, match in fronts if match and match.end()] or found[:1]

    def _likely(self, name: str) -> list[int]:
        tail = name[-_TAIL:]
        found = self._candidates.get(tail)
        if found is None:
            found = [at for at, end in enumerate(self._endings) if tail.endswith(end)]
            self._candidates[tail] = found
        return found


def ending(pattern: re.Pattern[str]) -> str:
    r"""What every whole match ends with, as far as that is plain to see.

    `layers\.(\d+)\.mlp\.weight` ends with `.mlp.weight`. Alternatives, flags that change what
    letters mean, and a letter that belongs to an escape before it are left to the regex itself.
    """
    text = pattern.pattern
    if pattern.flags & (re.IGNORECASE | re.VERBOSE) or "|" in text:
        return ""
    if text.endswith("$") and not text.endswith("\\$"):
        text = text[:-1]
    literal = _LITERAL_END.search(text)
    start = len(text) if literal is None else literal.start()
    if start and text[start - 1] == "\\":
        return ""
    return text[start:].replace("\\.", ".")


def expander(template: str) -> Expand:
    """`Match.expand` of one template; what does not match stays behind it.

    Older Pythons parse a template each time they expand it.
    """
    pieces = _REFERENCE.split(template)
    if any("\\" in text for text in pieces[::3]):
        return lambda match: match.expand(template) + match.string[match.end() :]
    # Literal text, the group's name, its number, literal text, …
    groups = [
        number if name is None else name
        for name, number in zip(pieces[1::3], pieces[2::3], strict=True)
    ]
    keys = [int(group) if group.isdigit() else group for group in groups]
    texts = pieces[3::3]

    def expand(match: re.Match[str]) -> str:
        made = pieces[0]
        for key, text in zip(keys, texts, strict=True):
            made += (match[key] or "") + text
        return made + match.string[match.end() :]

    return expand
