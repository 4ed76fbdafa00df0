"""A command: how it starts and ends, and its flags. Where it fails it says one sentence."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict

from coevolve_jax import preemption
from coevolve_jax.config import keys, loading

GOES_ON = "the same command goes on from what is saved."


class _ConfigFile(flags.ArgumentParser):
    """Parses --config=FILE:ARG by `loading.load_file`. A file that gives no config ends the program."""

    def parse(self, argument: str) -> ConfigDict:
        name, _, arg = argument.partition(":")
        try:
            return loading.load_file(name, arg).lock()
        except ValueError as error:
            sys.exit(f"Error: {error}")


def start(
    program: Callable[[], int | None], *errors: type[Exception], interrupted: str = "", resumes: bool = False
) -> None:
    """Runs a program that takes flags and no further words, and exits with the status that it returns.

    errors, interrupted: those of `exits`. resumes: the program saves and ends on a signal (preemption.py).
    """

    def main(argv: list[str]) -> int | None:
        if len(argv) > 1:
            sys.exit(f"Error: unexpected argument {argv[1]!r}: options begin with --, see --help.")
        logging.set_verbosity(logging.WARNING)
        handled = preemption.handle_signals() if resumes else contextlib.nullcontext()
        with exits(*errors, interrupted=GOES_ON if resumes else interrupted), handled:
            return program()

    app.run(main, flags_parser=parse_flags)


@contextlib.contextmanager
def exits(*errors: type[Exception], interrupted: str = "") -> Iterator[None]:
    """Ends the program with one sentence and an exit status where the block fails or is told to end.

    errors: exceptions, besides ValueError, whose text is written for a user. Others keep their traceback.
    interrupted: a clause with its full stop that says what Ctrl-C leaves.
    """
    try:
        yield
    except preemption.Preempted:
        print("Asked to end: every finished step is saved, and the same command goes on.", file=sys.stderr)
        sys.exit(preemption.STATUS)
    except KeyboardInterrupt:
        print(f"\nInterrupted{f': {interrupted}' if interrupted else '.'}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, *errors) as error:
        sys.exit(f"Error: {error}")


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags for absl's app.run. A wrong config key or value ends the program with one sentence."""
    given = [argument.lstrip("-").partition("=")[0] for argument in argv[1:]]
    given = [name.removeprefix("config.") for name in given if name.startswith("config.")]
    for name in given:
        if name in keys.RENAMED:
            sys.exit(f"Error: {keys.unknown(name)}")
    flag = flags.FLAGS["config"] if "config" in flags.FLAGS else None
    if flag is not None and hasattr(type(flag), "config_filename"):  # not the path alone
        flag.parser = _ConfigFile()
    try:
        return flags.FLAGS(argv)
    except BrokenPipeError:  # --help | head: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at the exit
        sys.exit(1)
    except flags.Error as error:
        why = str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ")
        sys.exit(f"Error: {_in_words(why)} (--help lists the options)")
    except (AttributeError, KeyError) as error:
        wrong = [name for name in given if name not in keys.REQUIRED and name.split(".")[-1] in str(error)]
        wrong += [name for name in given if name.split(".")[0] in str(error)]
        sys.exit(f"Error: {keys.unknown(wrong[0] if wrong else str(error))}")
    except (TypeError, ValueError) as error:
        sys.exit(f"Error: {error}")


def _in_words(why: str) -> str:
    """Says in a user's words what absl and Python say of a flag."""
    if unknown := re.match(r"Unknown command line flag '(config\.\S+)'", why):
        if "set" in flags.FLAGS:
            return f"--{unknown[1]} is no flag here: give --set={unknown[1].removeprefix('config.')}=VALUE"
        return f"--{unknown[1]} needs --config=FILE beside it"
    for said, wanted in (
        (r": invalid literal for int\(\).*", "a whole number"),
        (r": could not convert string to float.*", "a number"),
    ):
        why = re.sub(said, f": give {wanted}", why)
    return why


def check_output(flag: str, path: str | os.PathLike, *, folder: bool = False) -> None:
    """Raises ValueError where a command could not write this file, or folder, at its end. Makes nothing."""
    place = Path(path).absolute()
    near = next(there for there in (place, *place.parents) if os.path.exists(there))
    if near == place and place.is_dir() != folder:
        why = f"is a {'file' if folder else 'folder'}"
    elif near != place and not near.is_dir():
        why = f"lies below {near}, which is a file"
    elif not os.access(near, os.W_OK):
        why = f"cannot be written (no permission for {near})"
    else:
        return
    raise ValueError(f"--{flag}={path} {why}: choose another.")


def check_new_file(flag: str, path: str | os.PathLike) -> None:
    """Raises ValueError where a command could not write this new file at its end."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x"):
            pass
        Path(path).unlink()
    except OSError as error:
        why = "exists" if Path(path).exists() else f"cannot be written ({error.strerror})"
        raise ValueError(f"--{flag}={path} {why}: choose another.") from None
