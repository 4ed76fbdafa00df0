from typing import Any

class ModelCollection:
    @classmethod
    def load(cls, to: str, origin: str, load_apps: list[str], create_db: bool = False) -> Any: ...
