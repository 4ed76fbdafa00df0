"""The one tool of a text adventure, `act(command)`: valid commands, their verbs, and a user's words for them.

A command goes to the game's own parser and nowhere else. Only verbs that change or show the world get there.
The interpreter's own commands (save, restore, undo, quit, TextWorld's debugging commands) are no such verbs.
"""

from __future__ import annotations

import re

from coevolve_jax.envs.calls import bind, short, signatures
from coevolve_jax.types import Call

VERBS = (
    "look", "inventory", "examine", "go", "open", "close", "take", "drop", "put", "insert", "lock", "unlock",
    "eat"
)  # fmt: skip
MAX_COMMAND = 100  # characters
SEPARATORS = frozenset(("and", "then"))  # the parser splits a text into several commands at these words
ACT = {
    "type": "function",
    "function": {
        "name": "act",
        "description": "Does one thing in the house. A command is a verb and what it is about: "
        "look, inventory, examine X, go DIRECTION, open X, close X, take X, take X from Y, drop X, "
        "put X on Y, insert X into Y, lock X with Y, unlock X with Y, eat X.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "One command."}},
            "required": ["command"],
        },
    },
}
_SIGNATURES = signatures([ACT])
_OBJECT = re.compile(r"(examine|open|close|take|drop|put|insert|lock|unlock|eat) (?!the )(.+)")
_SECOND = re.compile(r" (from|on|into|with) (?!the )")


def read(call: Call) -> str:
    """Returns the command of a call, with single spaces. ValueError says in one sentence what is wrong."""
    command = bind(call, _SIGNATURES)["command"]
    if not isinstance(command, str):
        raise ValueError("The command must be text.")
    words = command.split()
    if len(command) > MAX_COMMAND:
        raise ValueError(f"The command has {len(command)} characters: at most {MAX_COMMAND} are allowed.")
    if not re.fullmatch(r"[A-Za-z0-9' -]+", " ".join(words)):
        raise ValueError(f"{short(command)} is no command: use letters, digits, spaces, ' and - only.")
    if words[0].lower() not in VERBS:
        raise ValueError(f"There is no verb {short(words[0])}: use one of {', '.join(VERBS)}.")
    if SEPARATORS.intersection(map(str.lower, words)):
        raise ValueError("Give one command at a time, about one thing.")
    return " ".join(words)


def verb(call: Call) -> str:
    """Returns the verb of a call, "" for a call without a valid command."""
    try:
        return read(call).split()[0].lower()
    except ValueError:
        return ""


def wording(call: Call) -> str:
    """Says a command as a user does: "take apple from table" becomes "take the apple from the table"."""
    try:
        command = read(call)
    except ValueError:
        return ""
    if command.lower() == "look":
        return "look around"
    if command.lower() == "inventory":
        return "tell me what you are carrying"
    return _SECOND.sub(r" \1 the ", _OBJECT.sub(r"\1 the \2", command))
