"""The processor's time that another process took."""

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """CPU time of a process in seconds, in steps of 10 ms."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
