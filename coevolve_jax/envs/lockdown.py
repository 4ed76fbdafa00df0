"""Locks processes down with what Linux offers to everybody: seccomp filters, and Landlock for files.

Neither needs privileges, and neither can be removed again. `shut_in` is for code of agents: it may compute
and nothing else. `confine` is for programs of users: they run as they are, but keep to their own folders.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
from collections.abc import Mapping, Sequence

MEMORY = 1 << 30  # bytes of address space
CPU_SECONDS = 120  # in total; then the kernel ends the process
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# By machine: AUDIT_ARCH and the numbers of system calls (linux/audit.h, asm/unistd.h). First those that
# `shut_in` allows.
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
_SOCKETS = {"x86_64": (41, 425), "aarch64": (198, 425)}  # socket, io_uring_setup
_GROUPS = {"x86_64": (109, 112), "aarch64": (154, 157)}  # setpgid, setsid
# shmget, msgget, semget, mq_open: what they make outlives the process.
_LASTING = {"x86_64": (29, 68, 64, 240), "aarch64": (194, 186, 190, 180)}
# prlimit64, setpriority: allowed where these arguments are 0, which is the process itself.
_OWN = {"x86_64": {302: (0,), 141: (0, 1)}, "aarch64": {261: (0,), 140: (0, 1)}}
_X32 = 0x40000000  # added to the numbers of system calls of x86_64's second interface
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of BPF
_ALLOW, _REFUSE, _PRETEND, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000, 0x80000000
_CAPABILITIES = 0x20080522  # the version of the kernel's interface that has 64 of them
_PR_DROP_CAPABILITY = 24
_PR_SET_DEATH_SIGNAL, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 1, 4, 38, 22, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, alike on both machines
_PATH_BENEATH, _VERSION, _SIGNALS = 1, 1, 1 << 1
# Landlock's rights (linux/landlock.h): write, and remove and make files of all kinds.
_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_MOVE, _TRUNCATE = 1 << 13, 1 << 14  # from versions 2 and 3 on
_ON_FILES = 1 << 1 | _TRUNCATE  # the rights that a rule on a file may have
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def check() -> None:
    """Raises RuntimeError where this machine cannot lock a process down."""
    if platform.system() != "Linux" or platform.machine() not in _NUMBERS:
        raise RuntimeError(
            f"Code of agents is run on Linux on {' or '.join(_NUMBERS)} only, since seccomp shuts it in; "
            f"this is {platform.system()} on {platform.machine()}."
        )


def die_with_parent(number: int) -> None:
    """Makes the kernel send this process the signal of this number when its parent ends."""
    _prctl(_PR_SET_DEATH_SIGNAL, number)


def ignore_endings() -> None:
    """Makes this process ignore what asks a job to end: it ends with the process that it works for."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def heed_endings() -> None:
    """Undoes `ignore_endings` in a process that this one has forked."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


def shut_in() -> None:
    """Locks this process down: from here on it can only compute, and read and write its open files.

    It can open, make, change or signal no file, socket, process or thread, not even by machine code. Attempts
    fail with EPERM. RuntimeError where the kernel has no seccomp.
    """
    check()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_DUMPABLE, 0)
    _filter(dict.fromkeys(_NUMBERS[platform.machine()][1], _ALLOW), otherwise=_REFUSE)


def confine(folders: Sequence[str], network: bool) -> None:
    """Keeps this process, and all that it starts, to these folders: it writes and signals nowhere else.

    Modes, times and attributes of other files of its user stay open to it: Landlock has no right for them.
    It loses all capabilities, so that root may do no more than others. It stays in its process group, so
    whoever kills the group kills all of it. network: whether it may open sockets. RuntimeError where the
    kernel has no seccomp. A kernel without Landlock (`guards_files`) lets it write wherever its user may, and
    one before Linux 6.12 lets it signal its user's processes.
    """
    check()
    machine = platform.machine()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _drop_capabilities()
    _keep_to(folders)
    refused = _LASTING[machine] + (() if network else _SOCKETS[machine])
    answers = dict.fromkeys(_GROUPS[machine], _PRETEND) | dict.fromkeys(refused, _REFUSE)
    _filter(answers, otherwise=_ALLOW, own=_OWN[machine])


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):  # fails for those that there are not, and for who has none to drop
        libc.prctl(_PR_DROP_CAPABILITY, capability, 0, 0, 0)
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()):
        raise RuntimeError(f"Dropping capabilities failed: {os.strerror(ctypes.get_errno())}.")


def guards_files() -> bool:
    """Says whether this kernel has Landlock, with which `confine` keeps a process from writing elsewhere."""
    return _landlock_version() > 0


def _landlock_version() -> int:
    return ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)


def _keep_to(folders: Sequence[str]) -> None:
    version = _landlock_version()
    if version <= 0:
        return
    rights = _WRITES | _MOVE * (version >= 2) | _TRUNCATE * (version >= 3)
    rules = _Ruleset(rights, 0, _SIGNALS if version >= 6 else 0)
    size = ctypes.sizeof(rules) if version >= 6 else ctypes.sizeof(ctypes.c_uint64)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    for path in (*folders, *_DEVICES):
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights if path in folders else rights & _ON_FILES
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(_Beneath(allowed, file)), 0)
        os.close(file)
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _filter(answers: dict[int, int], otherwise: int, own: Mapping[int, Sequence[int]] = {}) -> None:
    """Installs a seccomp filter. answers: what each system call gets, by number.

    own: by number, the arguments that must be 0, all of 32 bits; else the call is refused.
    """
    machine, _ = _NUMBERS[platform.machine()]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if platform.machine() == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for number, answer in answers.items():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    for number, arguments in own.items():
        lines.append((_EQUAL, 0, 3 * len(arguments) + 1, number))
        for argument in arguments:
            lines += [(_LOAD, 0, 0, 16 + 8 * argument), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
        lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_RETURN, 0, 0, otherwise))
    program = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(lines), program)))


def _call(number: int, *arguments) -> int:
    found = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if found < 0:
        raise RuntimeError(f"Landlock's system call {number} failed: {os.strerror(ctypes.get_errno())}.")
    return found


def _prctl(option: int, *arguments) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = [*arguments, 0, 0, 0, 0][:4]
    if libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)):
        raise RuntimeError(
            f"prctl({option}) failed ({os.strerror(ctypes.get_errno())}): the kernel lacks seccomp filters."
        )
