"""The snippets of README and docs: found in a page, run in its order, held against the output that the page shows.

A page is run in a folder of its own, in one namespace::

    python                  run; if the next block is text, what was printed must be what it shows
    python title="shop.py"  written into the folder, not run
    sh                      lines that begin with `ariadne ` go to the command line, and must exit 0 or with `# exits N`;
                            lines that begin with `python FILE.py ` go to the shell, and must exit 0;
                            what they print is held against a text block that follows
    others                  not run

In a text block the line `…` stands for any lines, or none.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ariadne.cli import main

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([\w-]*)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
EXITS = re.compile(r"#.*\bexits (\d+)")
PICTURE = re.compile(r"^ariadne draw .*--out \S+\.(?:svg|pdf|png)\b")  # which need Graphviz: the status is 3 without
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
NOX = re.compile(r"\bnox (?:.*? )?-s ['\"]?(\w+)")


class SnippetError(Exception):
    """A page says what is not so; the message begins with the page and the line."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file name in its title, its text, and the line of the page on which that begins."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(m[1], (TITLE.search(m[2]) or ["", ""])[1], m[3], text.count("\n", 0, m.start(3)) + 1)
        for m in FENCE.finditer(text)
    ]


def run(page: Path, folder: Path, *, compiling: bool = False, comparing: bool = True) -> None:
    """Run the snippets of a page in an empty folder; raises `SnippetError`, or what a snippet raises.

    Commands with `--compile` are left out, unless `compiling`. Without `comparing` the output is not looked at.
    """
    found = blocks(page)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]), _within(folder):
        torch.manual_seed(0)
        for block, after in pairwise([*found, Block("", "", "", 0)]):
            printed = io.StringIO()
            if block.language == "python" and block.title:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                # The page is the file: a traceback shows its lines.
                code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
                with contextlib.redirect_stdout(printed):
                    exec(code, namespace)
            elif block.language == "sh":
                for number, command in commands(block):
                    if command.startswith("python "):
                        _script(f"{page.name}:{number}", command, printed)
                    elif compiling or "--compile" not in command:
                        _command(f"{page.name}:{number}", command, printed)
            if after.language == "text" and block.language == "python" and not after.text.strip():
                raise SnippetError(
                    f"{page.name}:{after.line}: the page shows an empty output; show what is printed, or nothing"
                )
            shown = comparing and after.language == "text" and (printed.getvalue() or block.language == "python")
            if shown and not matches(after.text, printed.getvalue()):
                raise SnippetError(
                    f"{page.name}:{after.line}: the block prints something else than the page shows\n--- shown\n{after.text}"
                    f"--- printed\n{printed.getvalue()}"
                )


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """The commands of a sh block that begin with `ariadne` or run a Python file, with their lines of the page.

    A backslash at its end carries a line on.
    """
    text = re.sub(r"\\\n", "  ", block.text)  # as long as what it stands for, so that positions count the block's lines
    for m in re.finditer(r"^(?:ariadne|python \S+\.py) .*$", text, re.MULTILINE):
        yield block.line + block.text.count("\n", 0, m.start()), m[0]


def _command(where: str, line: str, printed: io.StringIO) -> None:
    exits = EXITS.search(line)
    expected = int(exits[1]) if exits else 3 if PICTURE.search(line) and not shutil.which("dot") else 0
    said = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            status = main(shlex.split(line, comments=True)[1:])
        except SystemExit as e:  # argparse: --help, or an option that is not there
            status = e.code
    if status != expected:
        raise SnippetError(f"{where}: `{line}` exits {status}, not {expected}\n{printed.getvalue()}{said.getvalue()}")


def _script(where: str, line: str, printed: io.StringIO) -> None:
    """Run a line of the shell in processes of its own, with the Python that runs this."""
    command = re.sub(r"\bpython (?=\S+\.py)", lambda _: f"{shlex.quote(sys.executable)} ", line)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, shell=True, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    printed.write(done.stdout)
    if done.returncode:
        raise SnippetError(f"{where}: `{line}` exits {done.returncode}\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[None]:
    """Work in a folder and import from it; what was imported from there is forgotten afterwards."""
    before = [*sys.path]
    with contextlib.chdir(folder):
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path[:] = before
            for name, module in list(sys.modules.items()):
                if (getattr(module, "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[name]


def matches(shown: str, printed: str) -> bool:
    """Whether a text shows what was printed, blanks at the ends of lines apart.

    >>> matches("a\\n…\\nz\\n", "a\\nb\\nc\\nz\\n")
    True
    """
    lines = [r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line.rstrip()) + r"\n" for line in _lines(shown)]
    return re.fullmatch("".join(lines), "".join(line.rstrip() + "\n" for line in _lines(printed))) is not None


def _lines(text: str) -> list[str]:
    return text.rstrip().split("\n")


def links(page: Path) -> list[tuple[int, str]]:
    """The links of a page, images included, with their lines; what stands in code is none."""
    text = page.read_text(encoding="utf-8")
    blank = re.compile(r"[^\n]")
    text = FENCE.sub(lambda m: blank.sub(" ", m[0]), text)
    text = re.sub(r"`[^`\n]+`", lambda m: blank.sub("x", m[0]), text)
    return [(text.count("\n", 0, m.start()) + 1, m[1]) for m in LINK.finditer(text)]


def dead_links(page: Path, within: Path) -> list[str]:
    """Links of a page to files that are not there, or that lie outside of a folder: such links hold in one place only."""
    found = []
    for line, link in links(page):
        if re.match(r"https?:|mailto:|#", link):
            continue
        target = (page.parent / link.partition("#")[0]).resolve()
        if not target.exists() or not target.is_relative_to(within.resolve()):
            found.append(f"{page.name}:{line}: {link}")
    return found


def unknown_sessions(page: Path, known: Sequence[str]) -> list[str]:
    """Sessions of nox that a page names and the noxfile does not have."""
    text = page.read_text(encoding="utf-8")
    return [f"{page.name}: nox -s {name}" for name in NOX.findall(text) if name not in known]
