"""The process that starts the servers of one worker, and cleans up behind them.

`python -P -m coevolve_jax.envs.mcp.launcher FOLDER` reads requests from its standard input, a Unix socket:

    {"start": {...}}, with three file descriptors for the server: starts a server and answers its process id
    {"code": pid}: answers the exit code of a server that has ended, negative for a signal, or null
    {"end": pid}: kills the server with all that it has started, and answers null

A server is confined (envs/lockdown.py) and leads a process group that nothing in it can leave. When nobody
holds the other end of the socket any more, the launcher ends all servers and deletes FOLDER. So nothing stays
behind, in whatever way the worker ends. Signals that ask all processes of a job to end do not end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from coevolve_jax.envs import lockdown

MESSAGE = 1 << 17  # bytes of a request


def launch(folder: str) -> None:
    """Serves requests until nobody is left to make any. folder: deleted at the end, whatever happens."""
    running: set[int] = set()
    try:
        _serve(socket.socket(fileno=os.dup(0)), running)
    finally:
        for pid in running:
            _end(pid)
        delete(folder)


def _serve(requests: socket.socket, running: set[int]) -> None:
    """Answers requests until there are no more. running: gets the process ids of the servers."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE, 3)
        if not message:
            return
        asked = json.loads(message)
        if "start" in asked:
            pid = os.fork()
            if not pid:
                _become(asked["start"], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            running.add(pid)
            answer = pid
        elif "code" in asked:
            answer = _code(asked["code"]) if asked["code"] in running else None
        else:
            answer = None
            if asked["end"] in running:  # a process id may be another process's by now
                _end(asked["end"])
                running.discard(asked["end"])
        requests.send(json.dumps(answer).encode())


def delete(folder: str) -> None:
    """Deletes a folder that may hold anything, as far as it can be deleted."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # too deep for functions that call themselves, or shut by its mode
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], check=False, stderr=subprocess.DEVNULL)


def _code(pid: int) -> int | None:
    """Returns the exit code of a server that has ended or ends just now. Its process id stays taken."""
    for _ in range(20):
        if ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(0.01)  # it closes its output before it has ended
    return None


def _end(pid: int) -> None:
    """Kills a server and its process group. Its process id stays taken until here, so no other is hit."""
    for kill in (os.kill, os.killpg):  # the group may not be there yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _become(server: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turns this forked process into a server. Where that fails, its standard error says why.

    server: "argv", "env", "folder" to start in, "writable" folders, "network", "memory" and "disk" in bytes.
    """
    try:
        os.setsid()
        lockdown.die_with_parent(signal.SIGKILL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 12)
        os.chdir(server["folder"])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that
        lockdown.heed_endings()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # Not the address space: V8 reserves far more of that than it uses.
        resource.setrlimit(resource.RLIMIT_DATA, (server["memory"], server["memory"]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (server["disk"], server["disk"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        lockdown.confine(server["writable"], server["network"])
        os.execve(server["argv"][0], server["argv"], server["env"])
    except BaseException as error:
        os.write(2, f"{server['argv'][0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    lockdown.ignore_endings()
    launch(sys.argv[1])
