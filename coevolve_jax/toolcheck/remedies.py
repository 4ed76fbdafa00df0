"""Remedies that differ with who writes the tools: a user her own class, or somebody a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

LEFT_OUT = "leave the tool out by config.environment.tools"


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Remedies by what is wrong.

    clock: a tool depends on a clock or on chance. beside: it depends on other worlds. ends: it ends its
    world, by words of the reason: the first that occur count. values: it never succeeds; {listed} and
    {arguments} name some of its arguments. others: it does nothing with the values tried. no_state, logs: no
    call, or every call, changes the state. alike: all worlds begin alike. long: the prompt is long.
    """

    clock: str
    beside: str
    ends: Mapping[str, str]
    values: str
    others: str
    no_state: str
    logs: str
    alike: str
    long: str


OWN = Remedies(
    clock="Let it follow from the seed of reset and the calls before; keep no time of day.",
    beside="Keep all state in the object: not in an imported module, a file or os.environ.",
    ends={"": "Raise an exception instead of ending the program, and bound the time that arguments ask for."},
    values="Name values that work, such as values = {{{listed}}}, or let another tool answer with them.",
    others="name other values, such as values = {{{listed}}}",
    no_state="Where a tool does change something, let state() return it.",
    logs="Leave logs and counters of calls out: define state(self), which returns what two worlds are "
    "compared by.",
    alike="Let reset(self, seed) make different worlds, or give `scenarios`, to measure what carries over.",
    long="Shorten the docstrings, leave tools out, or raise config.rollout.max_length.",
)
SERVER = Remedies(
    clock="Set config.environment.freeze_time, name files that are logs in config.environment.ignore, or "
    f"{LEFT_OUT}.",
    beside=f"Set config.environment.reuse_server=False, or {LEFT_OUT}.",
    ends={
        "with the id": f"Let the server answer each request with the id of the request, or {LEFT_OUT}.",
        "gave no answer": f"Raise config.environment.server_timeout where it is slow, or {LEFT_OUT}.",
        "by the clock": f"Raise config.environment.call_timeout where the machine is slow, or {LEFT_OUT}.",
        "ended": f"Let the server answer with an error instead of ending, or {LEFT_OUT}.",
        "sent more": f"Let it answer with less, or {LEFT_OUT}.",
        "": f"Mend the server, or {LEFT_OUT}.",
    },
    values='Name values that work in coevolve.json, such as {{"values": {{{listed}}}}}, or '
    f"{LEFT_OUT}.",
    others='name other values in coevolve.json, such as {{"values": {{{listed}}}}}',
    no_state="Where the server keeps a state, let it keep it below {world}.",
    logs="Leave logs and counters of calls out by config.environment.ignore.",
    alike="Give the template folders train, development and test, to measure what carries over.",
    long="Leave tools out by config.environment.tools, or raise config.rollout.max_length.",
)
# Their values come from the tables, and their server is ours.
FOLDERS = dataclasses.replace(
    SERVER,
    values=f"Let the tables hold values that work under the name {{arguments}}, or {LEFT_OUT}.",
    others="let the tables hold other values under the name {arguments}",
    no_state="Where a tool does change something, let it write that to the tables, below MCP_DB_DIR.",
)
SERVERS = {"mcp": SERVER, "folder_tools": FOLDERS}  # by config.environment.name
