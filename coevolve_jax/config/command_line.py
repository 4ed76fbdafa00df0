"""The flags of a command that takes a config: wrong ones get one sentence."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from coevolve_jax import shipped
from coevolve_jax.config import keys, loading

# The words of ml_collections where what get_config returned has no keys.
BARE = re.compile(r"Attribute <class '(\w+)'>\.(\w+) does not exist .* lookup: (\w+)")


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags for absl's app.run. A wrong config key or value ends the program with one sentence."""
    given = [argument.lstrip("-").partition("=")[0] for argument in argv[1:]]
    given = [name.removeprefix("config.") for name in given if name.startswith("config.")]
    named = ["", *(value for *_, value in _configs(argv))][-1]
    for name in given:
        if name in keys.RENAMED:
            sys.exit(f"Error: {keys.unknown(name)}")
    try:
        rest = flags.FLAGS(_found(argv))
        flag = flags.FLAGS["config"] if "config" in flags.FLAGS else None
        if flag is not None and flag.present and hasattr(flag, "config_filename"):  # not the path alone
            getattr(flag.value, "model", None)  # a file that is not there tells when it is looked at
            loading.checked(named, flag.value)
        return rest
    except BrokenPipeError:  # --help | head: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at the exit
        sys.exit(1)
    except flags.Error as error:
        why = str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ")
        sys.exit(f"Error: {_in_words(why)} (--help lists the options)")
    except (AttributeError, KeyError) as error:
        if (bare := BARE.search(str(error))) and bare[2] == bare[3]:
            sys.exit(f"Error: {loading.NO_CONFIG.format(named, bare[1])}")
        wrong = [name for name in given if name not in keys.REQUIRED and name.split(".")[-1] in str(error)]
        wrong += [name for name in given if name.split(".")[0] in str(error)]
        if not wrong and "'get_config'" in str(error):
            sys.exit(f"Error: {named} defines no function get_config: name a file that does.")
        sys.exit(f"Error: {keys.unknown(wrong[0] if wrong else str(error))}")
    except (TypeError, ValueError) as error:
        sys.exit(f"Error: {error}")
    except (OSError, SyntaxError, ImportError, NameError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        near = " or ".join(map(shipped.like, re.findall(r"'([^']+)'$", why)))
        meant = f"did you mean {near}" if near else "give one of configs/, or your own"
        sys.exit(f"Error: --config={named} cannot be loaded ({why}): {meant}.")


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


def _found(argv: list[str]) -> list[str]:
    """Returns the arguments with the config that --config names as a path (`shipped.config_file`)."""
    found = list(argv)
    for place, before, value in _configs(argv):
        name, colon, arg = value.partition(":")
        if name:
            found[place] = f"{before}{shipped.config_file(name)}{colon}{arg}"
    return found


def _configs(argv: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yields for each --config the place of its value among the arguments, what precedes it there, and it."""
    for i, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag in ("--config", "-config"):
            if equals:
                yield i, f"{flag}=", value
            elif i + 1 < len(argv):
                yield i + 1, "", argv[i + 1]


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
