"""The flags of a command that takes a config: wrong ones get one sentence."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from absl import flags

from coevolve_jax import shipped
from coevolve_jax.config import keys


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags for absl's app.run. A wrong config key or value ends the program with one sentence."""
    given = [argument.lstrip("-").partition("=")[0] for argument in argv[1:]]
    given = [name.removeprefix("config.") for name in given if name.startswith("config.")]
    for name in given:
        if name in keys.RENAMED:
            sys.exit(f"Error: {keys.unknown(name)}")
    try:
        rest = flags.FLAGS(_found(argv))
        if "config" in flags.FLAGS:  # a file that is not there tells when it is looked at
            getattr(flags.FLAGS["config"].value, "model", None)
        return rest
    except flags.Error as error:
        why = str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ")
        sys.exit(f"Error: {_in_words(why)} (--help lists the options)")
    except (AttributeError, KeyError) as error:
        wrong = [name for name in given if name not in keys.REQUIRED and name.split(".")[-1] in str(error)]
        wrong += [name for name in given if name.split(".")[0] in str(error)]
        if not wrong and "'get_config'" in str(error):
            sys.exit("Error: the file that --config names defines no function get_config.")
        sys.exit(f"Error: {keys.unknown(wrong[0] if wrong else str(error))}")
    except (TypeError, ValueError) as error:
        sys.exit(f"Error: {error}")
    except (OSError, SyntaxError, ImportError, NameError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        near = " or ".join(map(shipped.like, re.findall(r"'([^']+)'$", why)))
        meant = f"did you mean {near}" if near else "give one of configs/, or your own"
        sys.exit(f"Error: --config names no config file that can be read ({why}): {meant}.")


def _in_words(why: str) -> str:
    """Says in a user's words what absl and Python say of a flag."""
    if unknown := re.match(r"Unknown command line flag '(config\.\S+)'", why):
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
    for i, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag in ("--config", "-config"):
            place, before = (i, f"{flag}=") if equals else (i + 1, "")
            name, colon, arg = (value if equals else "".join(argv[place : place + 1])).partition(":")
            if name:
                found[place] = f"{before}{shipped.config_file(name)}{colon}{arg}"
    return found


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
