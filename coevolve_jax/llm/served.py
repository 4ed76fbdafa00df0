"""Identity of the model that answers: a server's address and its model. Run, cache and lineage record it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

ANY = "default"  # value of `model`: the one model that the server serves


class Served(NamedTuple):
    """Identity of a served model.

    model: its id, as the server calls it.
    key: a digest of address, id and root; the cache keeps answers under it.
    server: the address of the server. root: the model's origin, as the server states it. Both are "" where
      only a cache names the model.
    told: whether the server lists its models.
    """

    model: str
    key: str
    server: str = ""
    root: str = ""
    told: bool = True

    @property
    def name(self) -> str:
        """The model's id. SGLang takes a folder for an id: then the name of the folder."""
        return self.model.rstrip("/").rpartition("/")[2] if self.model.startswith("/") else self.model


def address(url: str) -> str:
    """Normalizes a base URL, and removes user and password."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    return urlunsplit((parts.scheme.lower(), host, parts.path.rstrip("/"), "", ""))


def digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def listed(body: str) -> dict[str, str] | None:
    """Parses the body of /v1/models into id -> root; None for a body that is no such list."""
    try:
        rows = json.loads(body)["data"]
        return {str(row["id"]): str(row.get("root") or "") for row in rows}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def choose(url: str, wanted: str, models: Mapping[str, str] | None, section: str) -> Served:
    """Chooses the model to ask. A name that the server does not list may still work, as an alias does.

    url, wanted: base_url and model of the section. models: by `listed`. section: of the config, for messages.
    Raises ValueError if the name is "default" and the server does not list exactly one model. A listed model
    with the id "default" is taken itself.
    """
    server = address(url)
    if wanted == ANY and ANY not in (models or {}):
        if not models:
            raise ValueError(
                f"config.{section}.model is {ANY!r}, and the server at config.{section}.base_url = "
                f"{server!r} does not list what it serves (GET /models): name the model in "
                f"config.{section}.model."
            )
        if len(models) > 1:
            raise ValueError(
                f"config.{section}.model is {ANY!r}, and the server at config.{section}.base_url = "
                f"{server!r} serves {len(models)} models: set config.{section}.model to one of "
                f"{', '.join(map(repr, sorted(models)))}."
            )
        (wanted,) = models
    root = (models or {}).get(wanted, "")
    return Served(wanted, digest(server, wanted, root), server, root, models is not None)


def going_on(now: Served, recorded: Served, section: str) -> Served:
    """Returns the identity that a resumed run uses: the recorded one, whose key finds its cached answers.

    The same model may be served at another address, if the server there lists its models. Raises ValueError
    for another model.
    """
    same = now.model == recorded.model and (not recorded.server or now.root == recorded.root)
    if same and (now.server == recorded.server or not recorded.server or now.told):
        return recorded
    then = " at ".join(filter(None, [_described(recorded), recorded.server]))
    raise ValueError(
        f"The run began with the answers of {then}, and config.{section}.base_url = {now.server!r} now "
        f"serves {_described(now)}: serve the first one again, or choose another --workdir."
    )


def from_cache(
    url: str, wanted: str, rows: Sequence[tuple[str, str, str]], path: str, section: str
) -> Served:
    """Finds the model whose answers `offline` of the section repeats.

    rows: (key, digest of the address, model) of each that the cache knows. path: the cache's file. Rows of
    this address come first. If there is none, the only other row with that model is taken. Raises ValueError
    where that leaves none or several.
    """
    named = [row for row in rows if wanted in (ANY, row[2])]
    found = [row for row in named if row[1] == digest(address(url))] or named
    if len(found) == 1:
        key, _, model = found[0]
        return Served(model, key)
    where = f"config.{section}.offline is True, and config.{section}.cache = {path!r} holds answers"
    if not found:
        others = ", ".join(map(repr, sorted({model for _, _, model in rows})))
        others = others or "none that this version wrote"
        raise ValueError(
            f"{where} of no model called {wanted!r} ({others}): name another file or model, or turn offline "
            "off."
        )
    raise ValueError(
        f"{where} of {len(found)} models or servers "
        f"({', '.join(map(repr, sorted(model for _, _, model in found)))}): set "
        f"config.{section}.model and config.{section}.base_url to those of the run."
    )


def _described(served: Served) -> str:
    return repr(served.model) + (f" ({served.root!r})" if served.root not in ("", served.model) else "")
