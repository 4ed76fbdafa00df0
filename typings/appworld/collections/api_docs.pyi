from typing import Any

class ApiDocCollection:
    @classmethod
    def build(cls, load_apps: tuple[str, ...]) -> Any: ...
