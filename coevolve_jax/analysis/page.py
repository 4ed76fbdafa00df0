"""Writes a view as one HTML page: template, style, scripts and data in one file. Large data lies beside it.

A view is not trusted. The template escapes its values, and data travels as base64. The scripts set text and
never markup. The page's content security policy lets no other script run.
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
PART = 1 << 20  # bytes of JSON, about, that the page unpacks at once
STYLES = ("vendor/uPlot.min.css", "style.css", "reader.css", "campaign.css")
SCRIPTS = (  # one subject each; they share one scope for names, and stand after those that they use
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
    "campaign.js",
    "main.js",
)


def write_page(
    path: pathlib.Path, view: Mapping[str, Any], rows: Iterable[Mapping], live: bool = False
) -> None:
    """Writes the page at `path`. The file is replaced atomically.

    rows: the full trajectories that view["trajectories"] lists, in the same order, then the origins of tasks
    (origins.py). If the page would be larger than LARGEST, they go to files beside it, for report.html to
    report_data/part_000.js and so on. These files must then travel with the page.

    live: the page asks its server for newer versions of itself.
    """
    texts, starts = [], []
    for start, part in _parts(rows):
        texts.append(_pack(part))
        starts.append(start)
    told = {**view, "part_starts": starts, "live": live}
    data = _pack(_json(told))
    embedded = len(data) + sum(map(len, texts)) <= LARGEST - SCRIPT
    folder = path.with_name(f"{path.stem}_data")
    if not embedded:
        data = _pack(_json({**told, "part_folder": folder.name}))
    names = [] if embedded else [f"part_{number:03d}.js" for number in range(len(texts))]
    for name, text, number in zip(names, texts, range(len(texts))):
        folder.mkdir(exist_ok=True)
        _replace(folder / name, f'coevolvePart({number},"{text}")\n')
    for old in folder.glob("part_*.js"):
        if old.name not in names:
            old.unlink()
    _replace(path, _render(view, data, texts if embedded else [], live))


def _parts(rows: Iterable[Mapping]) -> Iterator[tuple[int, bytes]]:
    """Yields (number of the first row, JSON {"rows": [...]}) for parts of about PART bytes."""
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
    """Encodes JSON in ASCII, so that a model's lone surrogate cannot break the page. NaN, infinity: null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return _json(json.loads(json.dumps(value), parse_constant=lambda name: None))


def _pack(text: bytes) -> str:
    """Deflates and encodes in base64, which can stand anywhere in a page."""
    return base64.b64encode(zlib.compress(text, 6)).decode()


def _render(view: Mapping[str, Any], data: str, parts: Sequence[str], live: bool) -> str:
    """Renders the page. data: the packed view. parts: packed rows, if the page embeds them."""
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
