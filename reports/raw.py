"""The files that a report keeps: where they lie in its folder, their digests, and the small ones as data URIs."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence

import pandas as pd

from reports.document import Download
from reports.frames import parquet
from reports.runs import RawFile, Run
from reports.words import size

LARGEST, MOST = 500_000, 1_000_000  # compressed, of one file and of all that the page holds


def kept(run: Run, baseline: Run | None, tables: Mapping[str, pd.DataFrame]) -> dict[str, RawFile]:
    """The files by their path in the report's folder: raw ones of each run, of the earlier run, and the tables."""
    found = {}
    for number, files in enumerate(run.folders, start=1):
        found |= {f"data/{number}/{f.name}": f for f in files}
    for files in baseline.folders if baseline else ():
        found |= {f"data/baseline/{f.name}": f for f in files}
    for name, frame in tables.items():
        found[f"data/tables/{name}.parquet"] = RawFile(name, f"table of {len(frame):,} rows, Parquet", parquet(frame))
    return found


def downloads(files: Mapping[str, RawFile]) -> Sequence[Download]:
    """Every file with its digest; the smallest first fill what room the page has for them."""
    packed = {path: gzip.compress(file.data, 9, mtime=0) for path, file in files.items()}
    room, held = MOST, set()
    for path in sorted(packed, key=lambda p: (len(packed[p]), p)):
        if len(packed[path]) <= min(room, LARGEST):
            held.add(path)
            room -= len(packed[path])
    return [
        Download(
            path,
            size(len(file.data)),
            hashlib.sha256(file.data).hexdigest(),
            f"{file.about}; {file.remark}" if file.remark else file.about,
            f"data:application/gzip;base64,{base64.b64encode(packed[path]).decode()}" if path in held else "",
        )
        for path, file in files.items()
    ]
