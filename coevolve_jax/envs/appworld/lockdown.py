"""Locks a process down: it may still compute, use its memory and its open files, and end.

A seccomp filter of Linux does this. It needs no privileges and cannot be removed again. The process can open,
make, change or signal no file, socket, process or thread, not even by machine code. Attempts fail with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource

MEMORY = 1 << 30  # bytes of address space
CPU_SECONDS = 120  # in total; then the kernel ends the process
# By machine: AUDIT_ARCH and the numbers of the allowed system calls (linux/audit.h, asm/unistd.h).
_COMMON = ("read", "write", "close", "brk", "mmap", "munmap", "mremap", "mprotect", "madvise", "futex",
           "getrandom", "clock_gettime", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack",
           "sched_yield", "restart_syscall", "exit", "exit_group")  # fmt: skip
_NUMBERS = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 12, 9, 11, 25, 10, 28, 202, 318, 228, 13, 14, 15, 131, 24, 219, 60, 231),
    ),
    "aarch64": (
        0xC00000B7,
        (63, 64, 57, 214, 222, 215, 216, 226, 233, 98, 278, 113, 134, 135, 139, 132, 124, 128, 93, 94),
    ),
}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of BPF
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_PR_SET_DEATH_SIGNAL, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 1, 4, 38, 22, 2


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def check() -> None:
    """Raises RuntimeError where this machine cannot lock a process down."""
    if platform.system() != "Linux" or platform.machine() not in _NUMBERS:
        raise RuntimeError(
            f"Code of agents is run on Linux on {' or '.join(_NUMBERS)} only, since seccomp shuts it in; "
            f"this is {platform.system()} on {platform.machine()}."
        )


def die_with_parent(signal: int) -> None:
    """Makes the kernel send this process the signal when its parent ends."""
    _prctl(_PR_SET_DEATH_SIGNAL, signal)


def shut_in() -> None:
    """Locks this process down: from here on it can only compute, and read and write its open files.

    RuntimeError where the kernel has no seccomp.
    """
    check()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    machine, numbers = _NUMBERS[platform.machine()]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for n, number in enumerate(numbers):
        lines.append((_EQUAL, len(numbers) - n, 0, number))
    lines += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    program = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(lines), program)))


def _prctl(option: int, *arguments) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = [*arguments, 0, 0, 0, 0][:4]
    if libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)):
        raise RuntimeError(
            f"prctl({option}) failed ({os.strerror(ctypes.get_errno())}): the kernel lacks seccomp filters."
        )
