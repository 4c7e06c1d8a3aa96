"""Names of a plan and of the code that is written from it: valid, unique, and never those of Python or of an op."""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata

from ariadne.plan.expr import FUNCTIONS

# Of generated code.
HELPERS = frozenset("broken_witness Halted identical same_data own set_grad_enabled autocast".split())


def one_line(text: str) -> str:
    """Text with each character that shows nothing, such as a line break, as its escape: fit for a comment.

    >>> one_line("a\\nimport os")
    'a\\\\nimport os'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class Namespace:
    """The one owner of names in a plan: valid, unique, and never those of Python or of an op."""

    def __init__(self, reserved: set[str]) -> None:
        # `input` is what many a forward calls its own; no code that is written from a plan asks the user for anything.
        self.taken = reserved | set(keyword.kwlist) | (set(dir(builtins)) - {"input"}) | set(FUNCTIONS)
        self.counts: dict[str, int] = {}

    def new(self, wanted: str) -> str:
        """A fresh name as near to `wanted` as can be."""
        wanted = unicodedata.normalize("NFKC", wanted)  # as Python reads names
        base = re.sub(r"\W", "_", wanted).lstrip("_") or "value"
        if base[0].isdigit():
            base = f"m{base}"
        if not base.isidentifier():
            base = re.sub(r"\W", "_", base, flags=re.ASCII)
        name = base
        while name in self.taken:
            self.counts[base] = self.counts.get(base, 0) + 1
            name = f"{base}_{self.counts[base]}"
        self.taken.add(name)
        return name
