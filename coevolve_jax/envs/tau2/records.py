"""Copy-on-write databases for tau2's worlds: airline's has 7 MB, of which a world changes a few records."""

from __future__ import annotations

from typing import Any

OWNED = {"retail": "orders", "airline": "reservations"}  # domain -> table whose records have an owner each


class Records(dict):
    """A copy-on-write table. All worlds share a record until it is read by its id.

    The tools change only records that they have read by their ids.
    """

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
        """The records that were read by their ids, or are new."""
        return [self[key] for key in sorted(self._own)]

    def changes(self) -> dict[str, dict]:
        """Returns the records that are new or differ from the shared ones, as plain values."""
        return {k: self[k].model_dump() for k in sorted(self._own) if self[k] != self._shared.get(k)}


def copied(database: Any, domain: str, user_id: str = "") -> Any:
    """Returns a database for one world.

    user_id: keeps this user's records and those that belong to nobody; "" keeps all.
    """
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
    """Returns the changed records as plain values, or all records where changes are not tracked.

    Equal worlds give equal values.
    """
    tables = {name: getattr(database, name) for name in type(database).model_fields}
    if all(isinstance(table, Records) for table in tables.values()):
        return {name: table.changes() for name, table in tables.items()}
    return database.model_dump()
