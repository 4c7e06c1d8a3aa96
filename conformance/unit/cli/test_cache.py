"""`ariadne cache`: what is kept is listed, bounded and thrown away, and nothing else is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ariadne.cli import main
from ariadne.cli.options import nbytes
from ariadne.compiled import Kept
from ariadne.plan import Batches


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """The user's folder, with two packages; that of `b` was used last."""
    monkeypatch.setenv("ARIADNE_CACHE_DIR", str(tmp_path / "packages"))
    folder, made = Kept.of_user(), tmp_path / "made"
    for name in "ab":
        made.write_bytes(name.encode() * 2000)
        folder.keep(name * 64, str(made), Batches(((1, 64),)), 2, f"prefix of {name}")
    return folder


def found(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["cache", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_packages_are_listed_with_what_they_take_and_when_they_were_used(
    kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"prefix of b +1 to 64 +2\.\d\d kB +just now\n", text)
    assert f"{kept.path}: 2 package(s), " in text
    assert found(capsys, "size")["bytes"] == kept.size


def test_a_limit_throws_away_what_is_beyond_it_and_clear_all_but_the_limit(
    kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    (kept.path / "notes.txt").write_text("not ours")
    assert found(capsys, "limit", "3kB")["freed"] > 2000
    assert [p["about"] for p in found(capsys)["packages"]] == ["prefix of b"]
    assert found(capsys, "clear")["freed"] > 2000
    assert (found(capsys)["packages"], found(capsys, "limit")["limit"]) == ([], 3000)
    assert sorted(path.name for path in kept.path.iterdir()) == ["limit.json", "notes.txt"]


def test_a_size_goes_with_limit_alone(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "3kB"]) == 2
    assert "ariadne cache clear takes no size" in capsys.readouterr().err
    assert len(kept.cards()) == 2


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("2k", 2000), ("1.5MB", 1_500_000), ("2GiB", 2**31)])
def test_sizes_are_read_as_they_are_typed(text: str, size: int) -> None:
    assert nbytes(text) == size
