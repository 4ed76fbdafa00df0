"""The protocol of driver and worker: one JSON object per line, on standard input and output.

The driver's first line is the job: {"folder": ..., "setting": ...}. The worker answers with its description.
Then it answers every {"do": name} with that function's result and the seconds it took. Numpy only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def serve(prepare: Callable[[dict], tuple[dict, dict[str, Callable[[], dict]]]]) -> None:
    """The worker's side. prepare: job -> (description, functions by name that wait for their results)."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error

    def say(**reply):
        print(json.dumps(reply), file=replies, flush=True)

    about, functions = prepare(json.loads(sys.stdin.readline()))
    say(about=about)
    for line in sys.stdin:
        start = time.perf_counter()
        result = functions[json.loads(line)["do"]]()
        say(**result, seconds=time.perf_counter() - start, peak=peak_bytes())


def peak_bytes() -> int:
    """This process's resident-set high-water mark since its start."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


class Worker:
    """The driver's side: a process that is stopped except while it is asked something.

    about: the worker's description. Raises RuntimeError, with the end of its standard error, where it dies.
    """

    def __init__(self, python: Path, script: Path, job: dict, log: Path, env: dict[str, str]):
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
            )
        self.about = self._exchange(job)["about"]

    def ask(self, do: str) -> dict:
        """The result of the worker's function `do`, with `seconds` and `peak` (bytes)."""
        self._process.send_signal(signal.SIGCONT)
        return self._exchange({"do": do})

    def state(self) -> str:
        """The state in /proc/PID/stat: "T" is stopped."""
        return Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _exchange(self, message: dict) -> dict:
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it is dead: the empty answer below says so
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            end = self._log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"The worker that logs to {self._log} ended with code {code}; its end: {end}")
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until it is stopped
        return json.loads(answer)
