"""A report as one HTML page that needs nothing else: no network, no fonts, no script to be read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

import jinja2
from markupsafe import Markup

from reports.document import Report

GENERATOR = "ariadne reports"
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("reports"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def html(report: Report) -> str:
    """The whole page. Whatever comes from data is escaped; only the charts, which are made here, go in as they are."""
    style, script = (_source(name) for name in ("style.css", "filter.js"))
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'"
    )
    page = _ENVIRONMENT.get_template("page.html")
    # Style and script are files of this package; an SVG's texts were escaped when it was drawn.
    return page.render(
        report=report, generator=GENERATOR, style=Markup(style), script=Markup(script), policy=policy, svg=Markup
    )


def index_html(runs: Iterable[Any]) -> str:
    """The page over published runs; each has a `name`, its folder, and a `report`."""
    template = _ENVIRONMENT.get_template("index.html")
    return template.render(runs=runs, generator=GENERATOR, style=Markup(_source("style.css")))


def _source(name: str) -> str:
    assert _ENVIRONMENT.loader is not None
    return _ENVIRONMENT.loader.get_source(_ENVIRONMENT, name)[0]


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
