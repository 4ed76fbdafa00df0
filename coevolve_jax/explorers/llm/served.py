"""Who answers: the address of a server and the model that it serves there. Run, cache and lineage record it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

ANY = "default"  # config.explorer.model: the one model that the server serves


class Served(NamedTuple):
    """model: its id, as the server calls it. key: a digest of address, id and root, under which the cache keeps answers.
    server, root: the address, and what the server says that the model is; "" where only a cache names the model. told:
    whether the server lists what it serves."""

    model: str
    key: str
    server: str = ""
    root: str = ""
    told: bool = True

    @property
    def name(self) -> str:
        """The model's id; of a folder, which SGLang takes for an id, its name."""
        return self.model.rstrip("/").rpartition("/")[2] if self.model.startswith("/") else self.model


def address(url: str) -> str:
    """A base URL in one form, without user and password."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    return urlunsplit((parts.scheme.lower(), host, parts.path.rstrip("/"), "", ""))


def digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def listed(body: str) -> dict[str, str] | None:
    """Id -> root of the models that /v1/models lists, by its body; None for a body that is no such list."""
    try:
        rows = json.loads(body)["data"]
        return {str(row["id"]): str(row.get("root") or "") for row in rows}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def choose(url: str, wanted: str, models: Mapping[str, str] | None) -> Served:
    """The model that is asked. url: config.explorer.base_url. wanted: config.explorer.model. models: by `listed`.

    A name that the server does not list may still be one of its own, such as an alias. Raises ValueError where the name
    is "default" and the server does not serve exactly one model, or does not say.
    """
    server = address(url)
    if wanted == ANY and ANY not in (models or {}):
        if not models:
            raise ValueError(
                f"config.explorer.model is {ANY!r}, and the server at config.explorer.base_url = {server!r} does not list "
                "what it serves (GET /models): name the model in config.explorer.model."
            )
        if len(models) > 1:
            raise ValueError(
                f"config.explorer.model is {ANY!r}, and the server at config.explorer.base_url = {server!r} serves "
                f"{len(models)} models: set config.explorer.model to one of {', '.join(sorted(models))}."
            )
        (wanted,) = models
    root = (models or {}).get(wanted, "")
    return Served(wanted, digest(server, wanted, root), server, root, models is not None)


def going_on(now: Served, recorded: Served) -> Served:
    """Returns the identity that a run goes on with: the one it began with, whose key finds its answers. It may find the same model
    at another address, where the server there says so. Raises ValueError for another model."""
    same = now.model == recorded.model and (not recorded.server or now.root == recorded.root)
    if same and (now.server == recorded.server or not recorded.server or now.told):
        return recorded
    then = " at ".join(filter(None, [_described(recorded), recorded.server]))
    raise ValueError(
        f"The run began with the answers of {then}, and config.explorer.base_url = {now.server!r} now serves "
        f"{_described(now)}: serve the first one again, or choose another --workdir."
    )


def from_cache(url: str, wanted: str, rows: Sequence[tuple[str, str, str]], path: str) -> Served:
    """The model whose answers config.explorer.offline repeats. rows: key, digest of the address, and model of each that
    the cache knows. Those of this address come first; another one does where the cache has no more than one.

    Raises ValueError where the cache does not tell which.
    """
    named = [row for row in rows if wanted in (ANY, row[2])]
    found = [row for row in named if row[1] == digest(address(url))] or named
    if len(found) == 1:
        key, _, model = found[0]
        return Served(model, key)
    where = f"config.explorer.offline is True, and config.explorer.cache = {path!r} holds answers"
    if not found:
        others = ", ".join(sorted({model for _, _, model in rows})) or "none that this version wrote"
        raise ValueError(
            f"{where} of no model called {wanted!r} ({others}): name another file or model, or turn offline off."
        )
    raise ValueError(
        f"{where} of {len(found)} models or servers ({', '.join(sorted(model for _, _, model in found))}): set "
        "config.explorer.model and config.explorer.base_url to those of the run."
    )


def _described(served: Served) -> str:
    return repr(served.model) + (f" ({served.root})" if served.root not in ("", served.model) else "")
