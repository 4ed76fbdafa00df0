from datetime import datetime
from typing import Any

def freeze_time(time_to_freeze: datetime) -> Any: ...
