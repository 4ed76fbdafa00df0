"""The command coevolve: the programs of experiments/ by one name, in a checkout and in an installed wheel.

    coevolve demo                                             a small run, and its report
    coevolve train --config=bfcl_tiny --workdir=runs/mine     as python experiments/main.py
    coevolve train --help                                     all flags of a command

A command takes the flags of its program, unchanged. It needs the standard library until the program starts.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import sys

import coevolve_jax
from coevolve_jax.shipped import PROGRAMS, ROOT

HELP = {"--help", "-help", "-h", "--helpshort", "--helpfull", "-?"}


def main() -> None:
    """Starts the program that the first argument names, with the others as its arguments."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command == "help" and arguments:
        command, arguments = arguments[0], ["--help"]
    if command in HELP | {"help"}:
        print(overview())
    elif command == "--version":
        print(coevolve_jax.__version__)
    elif command not in PROGRAMS:
        sys.exit(f"Error: coevolve has no command {command!r}: use one of {', '.join(PROGRAMS)}.")
    elif asked := HELP.intersection(arguments[: [*arguments, "--"].index("--")]):
        print(in_words_of_commands(help_of(command, "--help" if "-h" in asked else asked.pop())), end="")
    else:
        start(command, arguments)


def start(command: str, arguments: list[str]) -> None:
    """Runs a program as `python PROGRAM ARGUMENT...` would, in this process."""
    program = PROGRAMS[command]
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


def help_of(command: str, flag: str) -> str:
    """Returns what a program prints about itself when it gets this flag of HELP."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        start(command, [flag])
    return told.getvalue()


def in_words_of_commands(text: str) -> str:
    """Replaces the names of programs by those of commands: experiments/main.py is coevolve train."""
    for command, program in PROGRAMS.items():
        text = re.sub(
            rf"(?:python )?(?:\S*\b{program.parent.name}/)?\b{program.name}\b", f"coevolve {command}", text
        )
    return text.replace("python -m coevolve_jax.analysis.report", "coevolve report")


def overview() -> str:
    """Returns the help of `coevolve` itself: each command with the first sentence of its program."""
    about = lambda path: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    rows = [f"    {name:<13} {about(path)}" for name, path in PROGRAMS.items()]
    return "\n".join(
        [
            "coevolve COMMAND [flags]; coevolve COMMAND --help lists a command's flags.",
            "",
            *rows,
            "",
            "--config takes a file, or the name of a config that comes with the package, such as bfcl_tiny.",
            f"Guides and notes, which helps name as docs/..., are in {ROOT / 'docs'}.",
        ]
    )
