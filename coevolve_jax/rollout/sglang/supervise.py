"""Runs a command that must not outlive the process that asked for it (standard library only, Linux).

    python supervise.py OWNER_PID SCRATCH_FOLDER COMMAND ...

It acts when the command ends, when it gets SIGTERM, or when the owner is gone (even by kill -9). Then it
kills the command's whole process group, waits for it, and deletes the scratch folder.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.05
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    owner, scratch, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the group become our children, to wait for
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    # Where this process is killed, the command dies too. Nobody is left to kill the rest of its group then.
    child = subprocess.Popen(
        command, process_group=0, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    # Compare the parent's id: a death signal would already come when the *thread* that started us ends.
    while child.poll() is None and os.getppid() == owner and not asked:
        time.sleep(POLL_SECONDS)
    if child.returncode is not None:
        print(f"The server process ended with code {child.returncode}.", flush=True)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # no process of the group is left
        pass
    code = child.wait()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
