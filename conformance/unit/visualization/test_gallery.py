"""The gallery of the docs is of now, and complete."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def gallery() -> Any:
    spec = importlib.util.spec_from_file_location("gallery_of_the_docs", ROOT / "docs/site/gallery.py")
    assert spec
    assert spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gallery_was_made_by_the_code_that_draws_now(gallery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gallery.py", "--check"])
    gallery.main()


def test_a_gallery_of_other_code_is_stale(gallery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gallery.py", "--check"])
    monkeypatch.setattr(gallery, "SOURCES", gallery.SOURCES[1:])
    with pytest.raises(SystemExit, match=r"stale: drawings have changed since; run `python docs/site/gallery\.py`"):
        gallery.main()


def test_ten_models_have_a_drawing_a_profile_cuts_and_a_line_and_none_is_left_over(gallery: Any) -> None:
    text = gallery.PAGE.read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) == len(gallery.MODELS) == 10
    for section in sections:
        assert len(re.findall(r"^    ariadne draw \S+ \S+ --out \S+\.svg$", section, re.MULTILINE)) == 1
        assert len(re.findall(r"^\| `after:", section, re.MULTILINE)) >= 1
        assert len(re.findall(r"!\[", section)) == 2
    named = set(re.findall(r"\(images/gallery/([^)]+)\)", text))
    assert named == {p.name for p in gallery.PICTURES.iterdir()}
    for name in named:
        height = re.search(r'<svg\b[^>]*? height="(\d+)', (gallery.PICTURES / name).read_text())
        assert height
        assert int(height[1]) * 4 / 3 <= 2000
