"""Regular expressions from a file that anybody may have written: compiled only where matching has a bounded cost."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from itertools import pairwise

MAX_PATTERN = 1000
"""Characters of an entry of an exclude list; none that names a module or several is nearly as long."""
MAX_STEPS = 10**9
"""Steps of matching that all patterns of a list may take together."""

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|\(\?(?:P<\w+>|<?[=!]|[aiLmsu]*[:)])|.", re.DOTALL)
_SURE = re.compile(r"(?:\\d|\[0-9\])[*+](?=\\\.|\Z)|(?<!\\)\.\*\Z")  # can end in one place only
_REPEATS = ("*", "+")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern. `repeats` open-ended quantifiers, `choices` by which ? and | multiply the ways to match."""

    regex: re.Pattern[str]
    repeats: int
    choices: int

    def steps(self, length: int) -> int:
        """An upper estimate of the steps that one name of `length` characters takes."""
        ways: int = (length + 1) ** max(self.repeats, 1) // math.factorial(self.repeats)
        return ways * self.choices


def compiled(text: str) -> Pattern | None:
    """A pattern, or None for one that is too long, no regular expression, or may take exponential time.

    Refused are repeated groups, back references, comments and verbose mode.
    """
    if len(text) > MAX_PATTERN:
        return None
    tokens = _TOKEN.findall(_SURE.sub("0", text))
    repeats = choices = 0
    for before, token in pairwise(["", *tokens]):
        if token == "?":
            choices += before not in _REPEATS and not before.startswith("{")
        elif token in _REPEATS or (token.startswith("{") and len(token) > 1):
            if before == ")":
                return None
            repeats += 1
        elif token == "|":
            choices += 1
        elif re.fullmatch(r"\\[1-9]", token):
            return None
    if any(pair == ("(", "?") for pair in pairwise(tokens)):  # (?x), (?#...), (?P=...), (?(...)...)
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Pattern(re.compile(text), repeats, 2**choices)
    except (re.error, OverflowError, RecursionError, MemoryError, ValueError):
        return None


def compiling(text: str) -> int:
    """Steps that compiling an expression or a glob is counted for."""
    return 10_000 + 500 * len(text)


class Budget:
    """Steps left for the patterns of one list: those beyond it are not tried, whatever the machine's speed."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def allows(self, pattern: Pattern, names: int, length: int) -> bool:
        """Take what matching `names` names of `length` characters at most costs; False when too little is left."""
        return self.take(names * pattern.steps(length))

    def take(self, cost: int) -> bool:
        """Take a cost; False, and nothing taken, when too little is left."""
        if cost > self._left:
            return False
        self._left -= cost
        return True
