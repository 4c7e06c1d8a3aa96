"""README and docs: their snippets run and print what they show, their links lead somewhere, their sessions exist.

What makes the pages themselves is `nox -s docs`, which treats warnings as errors.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from conformance.suite import snippets
from conformance.suite.snippets import SnippetError

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [p.relative_to(ROOT).as_posix() for p in PAGES]
SESSIONS = re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)\(", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
TESTED = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints/tested.txt").read_text(), re.MULTILINE)[1]

every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)
with_snippets = [p for p in PAGES if any(b.language in ("python", "sh") for b in snippets.blocks(p))]
with_compilers = [p for p in with_snippets if any("--compile" in b.text for b in snippets.blocks(p))]


@pytest.mark.zoo
@pytest.mark.parametrize("page", with_snippets, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_snippets_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    # What other versions of torch print may differ: the ops of a plan are torch's.
    snippets.run(page, tmp_path, comparing=torch.__version__.startswith(f"{TESTED}."))


@pytest.mark.zoo
@pytest.mark.compiler
@pytest.mark.parametrize("page", with_compilers, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_that_compile_exit_as_it_says(page: Path, tmp_path: Path) -> None:
    snippets.run(page, tmp_path, compiling=True, comparing=False)


@every_page
def test_links_lead_to_files_and_those_of_docs_stay_within_docs(page: Path) -> None:
    # GitHub shows all of the repository, the site only docs: a link out of it would be dead in one of the two.
    assert not snippets.dead_links(page, ROOT if page.parent == ROOT else DOCS)


@every_page
def test_every_session_that_a_page_names_exists(page: Path) -> None:
    assert not snippets.unknown_sessions(page, SESSIONS)


def test_every_page_is_in_the_navigation_and_the_other_way_round() -> None:
    text = (DOCS / "site/mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", text)) == sorted(p.relative_to(DOCS).as_posix() for p in PAGES[1:])


def test_files_that_the_pages_for_contributors_name_exist() -> None:
    text = "".join((DOCS / name).read_text() for name in ("architecture.md", "contributing.md"))
    names = re.findall(r"`([\w/]+\.(?:py|toml|md|lock))`", text)
    folders = ("ariadne", "conformance", "constraints", "docs", "model_zoo")
    known = {f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.*")}
    assert names
    assert not [name for name in names if not any(path.endswith(f"/{name}") for path in known)]


# --- the checker is checked -----------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "page.md"


def run(page: Path, text: str, **options: bool) -> None:
    page.write_text(text)
    snippets.run(page, page.parent / "run", **options)


MODEL = """
```python title="shop.py"
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
```
"""


def test_a_good_page_passes(page: Path) -> None:
    text = """
```python
import torch
from shop import net

print(torch.rand(1).item())
print("a\\nb\\nc")
```

Prose.

```text
0.49625658988952637
…
c
```

```sh
ariadne plan shop.py:net --input 3 \\
  --brief
ariadne cuts shop.py:net --input 3 --why cut:9  # exits 3
pip install what-is-not-there
```
"""
    run(page, MODEL + text)
    with pytest.raises(ModuleNotFoundError):  # the next page has a shop of its own
        __import__("shop")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", r"(?s)page\.md:6: .*shown\n2\n--- printed\n1\n"),
        ("```python\nprint(1)\n```\n```text\n…\n1\n2\n```\n", r"page\.md:5: "),
        ("```python\nx = 1\n```\n```text\n1\n```\n", r"page\.md:5: "),
        ("```sh\nls\nariadne plan\n```\n", r"page\.md:3: `ariadne plan` exits 2, not 0"),
        (
            MODEL + "```sh\n\nariadne plan shop.py:net --input 3 --brief  # exits 1\n```\n",
            r"page\.md:10: .* exits 0, not 1",
        ),
        (MODEL + "```sh\nariadne cuts shop.py:net --input 3 --csv\n```\n```text\nnothing\n```\n", r"page\.md:12: "),
    ],
)
def test_a_wrong_output_or_status_is_noticed(page: Path, text: str, says: str) -> None:
    with pytest.raises(SnippetError, match=says):
        run(page, text)


def test_a_snippet_that_raises_is_noticed_with_its_line(page: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run(page, "prose\n\n```python\nx = 1\nassert x == 2\n```\n")
    at = caught.traceback[-1]
    assert (at.path, at.lineno + 1) == (page, 5)


def test_blocks_share_a_namespace_and_only_python_and_commands_are_run(page: Path) -> None:
    run(page, "```python\nx = 1\n```\n```toml\n1/0\n```\n```console\n$ false\n```\n```python\nassert x == 1\n```\n")
    with pytest.raises(NameError):
        run(page, "```python\nx\n```\n")


def test_commands_that_compile_run_only_where_a_compiler_is_wanted(page: Path) -> None:
    text = "```sh\nariadne doctor --compile --not-there\n```\n"
    run(page, text)
    with pytest.raises(SnippetError, match="--not-there"):
        run(page, text, compiling=True)


def test_output_is_not_compared_where_that_is_asked_for(page: Path) -> None:
    run(page, "```python\nprint(1)\n```\n```text\n2\n```\n", comparing=False)


def test_a_dead_link_and_one_that_leaves_the_folder_are_noticed(page: Path) -> None:
    page.write_text(
        "[a](gone.md) [b](page.md#here) `[c](code.md)` [d](https://example.org)\n![e](gone.svg)\n[f](../x/../)\n"
        "```python\na[0](1)\n```\n"
    )
    assert snippets.dead_links(page, page.parent) == [
        "page.md:1: gone.md",
        "page.md:2: gone.svg",
        "page.md:3: ../x/../",
    ]


def test_a_session_that_does_not_exist_is_noticed(page: Path) -> None:
    assert {"tests", "torch", "docs", "benchmarks_cuda"} <= set(SESSIONS)
    page.write_text("`nox -s tests`, `.venv/bin/nox -s report -- RUN`, `nox -db virtualenv -s 'gone(1)'`\n")
    assert snippets.unknown_sessions(page, SESSIONS) == ["page.md: nox -s gone"]
