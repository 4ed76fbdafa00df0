"""tau2's databases as worlds have them: airline's is 7 MB, and a world changes a few records of it."""

from __future__ import annotations

from typing import Any

OWNED = {"retail": "orders", "airline": "reservations"}  # the table whose records belong to one user each


class Records(dict):
    """A table. Its records are shared with all worlds until one is asked for by its id: the tools change no other."""

    def __init__(self, shared: dict[str, Any]):
        super().__init__(shared)
        self._shared, self._own = shared, set()

    def __getitem__(self, key: str) -> Any:
        if key not in self._own:
            self[key] = super().__getitem__(key).model_copy(deep=True)
        return super().__getitem__(key)

    def __setitem__(self, key: str, record: Any) -> None:
        super().__setitem__(key, record)
        self._own.add(key)

    @property
    def touched(self) -> list[Any]:
        """The records that were asked for by their ids, or are new."""
        return [self[key] for key in sorted(self._own)]

    def changes(self) -> dict[str, dict]:
        """The records that are new or others now, as plain values."""
        return {k: self[k].model_dump() for k in sorted(self._own) if self[k] != self._shared.get(k)}


def copied(database: Any, domain: str, user_id: str = "") -> Any:
    """A database for one world. user_id: it has this user's records, and what belongs to nobody; "" for everybody's."""
    if domain not in OWNED:
        return type(database).model_validate(
            database.model_dump()
        )  # telecom's is small, its tables are lists
    tables = {name: getattr(database, name) for name in type(database).model_fields}
    if user_id:
        user, owned = database.users[user_id], OWNED[domain]
        tables |= {"users": {user_id: user}, owned: {id: tables[owned][id] for id in getattr(user, owned)}}
    return type(database).model_construct(**{name: Records(table) for name, table in tables.items()})


def changes(database: Any) -> dict:
    """What equal worlds have in common, as plain values: the changed records; all of them where they are not tracked."""
    tables = {name: getattr(database, name) for name in type(database).model_fields}
    if all(isinstance(table, Records) for table in tables.values()):
        return {name: table.changes() for name, table in tables.items()}
    return database.model_dump()
