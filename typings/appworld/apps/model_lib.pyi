from typing import Any

get_direct_cached_sqlite3_connection: Any
