"""Docstrings as Markdown: examples and literal blocks become fenced code, so that the site shows them as they are written."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Docstring, Extension, Object

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)
LITERAL = re.compile(r"::\n\n((?: {4}.*\n?|\n(?= {4}))+)")
FENCED = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)


class Fences(Extension):
    """Rewrites every docstring as it is read from its file."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Fence the docstring of one module, class, function or attribute."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The docstring with `>>>` paragraphs, and indented blocks after `::`, in fences; `<` in prose is that sign, no tag."""
    text = EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", text)
    text = LITERAL.sub(lambda m: f":\n\n```text\n{textwrap.dedent(m[1].rstrip())}\n```\n", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in FENCED.split(text))
