from typing import Any

get_direct_cached_sqlite3_connection: Any

class CachedDBHandler:
    @classmethod
    def get(cls, db_app_path: str) -> Any: ...

def db_home_to_app_path(db_home_path: str, app_name: str) -> str: ...
