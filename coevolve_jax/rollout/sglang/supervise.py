"""Runs a command that must not outlive the process that asked for it (standard library only, Linux).

    python supervise.py OWNER_PID SCRATCH_FOLDER COMMAND ...

When the command ends, when this process gets SIGTERM or when the owner is gone (even by kill -9), the
command's whole process group is killed and waited for, and the scratch folder deleted.
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
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans in the group become ours, to be waited for
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    # Should this process be killed, the command dies too, although nobody is left to kill its group.
    child = subprocess.Popen(
        command, process_group=0, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    # The parent's id, not a death signal: that one fires when the *thread* that started us ends.
    while child.poll() is None and os.getppid() == owner and not asked:
        time.sleep(POLL_SECONDS)
    if child.returncode is not None:
        print(f"The server process ended with code {child.returncode}.", flush=True)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # it left nothing behind
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
