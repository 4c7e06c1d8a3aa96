"""Docstrings as Markdown: examples and literal blocks become fenced code, so that the site shows them as they are written."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)
LITERAL = re.compile(r"::\n\n((?: {4}.*\n?|\n(?= {4}))+)")


class Fences(Extension):
    """Rewrites every docstring as it is read from its file."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Fence the docstring of one module, class, function or attribute."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The docstring with each `>>>` paragraph, and each indented block after `::`, in a fence of its own."""
    text = EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", text)
    return LITERAL.sub(
        lambda m: ":\n\n```text\n" + re.sub(r"^ {4}", "", m[1].rstrip(), flags=re.MULTILINE) + "\n```\n", text
    )
