"""One HTML page from a view: template, style, scripts and data in one file, or data beside it where it is large.

Nothing in a view is trusted. The template escapes what it shows, data travels as base64, the scripts set text and
never markup, and the page's own policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

LARGEST = 5_000_000  # bytes of a page that holds all of its data
SCRIPT = 200_000  # bytes, at most, of a page without its data
PART = 1 << 20  # bytes of JSON, about, that are unpacked at once
STYLES = ("vendor/uPlot.min.css", "style.css", "reader.css")
SCRIPTS = (  # each one subject; a name of one is a name of all, those that are used first stand first
    "vendor/uPlot.iife.min.js",
    "dom.js",
    "data.js",
    "charts.js",
    "panels_learning.js",
    "panels_evolution.js",
    "panels_costs.js",
    "panels_machine.js",
    "list.js",
    "map.js",
    "llm_calls.js",
    "tasks.js",
    "tokens.js",
    "trajectories.js",
    "comparison.js",
    "main.js",
)


def write_page(
    path: pathlib.Path, view: Mapping[str, Any], rows: Iterable[Mapping], live: bool = False
) -> None:
    """Writes the page at `path`, replacing it at once.

    rows: what view["trajectories"] lists, in full and in the same order, and then what its tasks come from
    (origins.py). Where the page would be larger than
    LARGEST they go to path's folder, as report_data/part_000.js and so on, which must then travel with the page.
    live: the page asks its server for newer versions of itself.
    """
    texts, starts = [], []
    for start, part in _parts(rows):
        texts.append(_pack(part))
        starts.append(start)
    data = _pack(_json({**view, "part_starts": starts, "live": live}))
    embedded = len(data) + sum(map(len, texts)) <= LARGEST - SCRIPT
    folder = path.with_name(f"{path.stem}_data")
    names = [] if embedded else [f"part_{number:03d}.js" for number in range(len(texts))]
    for name, text, number in zip(names, texts, range(len(texts))):
        folder.mkdir(exist_ok=True)
        _replace(folder / name, f'coevolvePart({number},"{text}")\n')
    for old in folder.glob("part_*.js"):
        if old.name not in names:
            old.unlink()
    _replace(path, _render(view, data, texts if embedded else [], live))


def _parts(rows: Iterable[Mapping]) -> Iterator[tuple[int, bytes]]:
    """Rows as JSON, {"rows": [...]}, in parts of about PART bytes, each with the number of its first row."""
    start, part, size = 0, [], 0
    for row in rows:
        part.append(_json(row))
        size += len(part[-1])
        if size >= PART:
            yield start, b'{"rows":[%s]}' % b",".join(part)
            start, part, size = start + len(part), [], 0
    if part:
        yield start, b'{"rows":[%s]}' % b",".join(part)


def _json(value: Any) -> bytes:
    """ASCII, so that half a character of a model cannot spoil a page; NaN and infinity are null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return _json(json.loads(json.dumps(value), parse_constant=lambda name: None))


def _pack(text: bytes) -> str:
    """Deflated, in base64: text that can stand anywhere in a page."""
    return base64.b64encode(zlib.compress(text, 6)).decode()


def _render(view: Mapping[str, Any], data: str, parts: Sequence[str], live: bool) -> str:
    """The page. data: the packed view; parts: of the rows, where they stand in the page."""
    files = importlib.resources.files("coevolve_jax.analysis") / "viewer"
    read = lambda name: (files / name).read_text(encoding="utf-8")
    style, script = ("\n".join(map(read, names)) for names in (STYLES, SCRIPTS))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(read("page.html.j2")).render(
        view=view,
        data=data,
        parts=parts,
        style=Markup(style),
        script=Markup(script),
        style_hash=_digest(f"\n{style}\n"),
        script_hash=_digest(f"\n{script}\n"),
        live=live,
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _replace(path: pathlib.Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # a run and a server may write at once
    temporary.write_text(text, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
