"""Any server of the Model Context Protocol as an environment family (docs/guides/train_on_an_mcp_server.md).

A world is a copy of a template folder and a server process of its own (world.py). The launcher starts and
confines it (launcher.py, asked by servers.py). client.py speaks the protocol, answers.py puts its words into
ours, state.py reads the folder, environment.py grades, spares.py keeps servers that wait. templates.py finds
the scenarios, values.py helps explorers.

Workers need the standard library only. The server is whatever program config.environment.command names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coevolve_jax.envs.base import Environment
from coevolve_jax.envs.mcp import templates, values
from coevolve_jax.envs.mcp.spec import Spec
from coevolve_jax.types import Call, Task, Turn


def scenarios(split: str, settings: Mapping[str, Any], apart_from: str = "") -> list[Task]:
    """Returns one scenario for each template of a split. apart_from: a split whose templates are left out.

    A single template gives the same scenario in every split. ValueError where the server cannot be started.
    """
    found = []
    for template in templates.of_split(settings, split, apart_from):
        spec = Spec.of({**settings, "template": str(template)})
        spec.check()
        templates.check_size(template, spec.server_disk)
        told = templates.notes(template, settings)["values"]
        known = values.of_template(template, listed(spec)) | told
        scenario = {**spec.scenario(), **({"values": known} if known else {})}
        found.append(Task(f"{split}_{template.name}", "mcp", scenario))
    return found


def tasks(split: str, settings: Mapping[str, Any]) -> list[Task]:
    """Returns the tasks that a user has written into coevolve.json; most templates have none."""
    made = []
    for bare, template in zip(scenarios(split, settings), templates.of_split(settings, split)):
        for n, told in enumerate(templates.notes(template, settings)["tasks"]):
            turns = tuple(map(_turn, told.get("turns", [told])))
            made.append(Task(f"{bare.id}_{n}", "mcp", bare.scenario, turns))
    return made


def _turn(told: Mapping[str, Any]) -> Turn:
    return Turn(told["query"], tuple(Call(call["name"], call["arguments"]) for call in told["calls"]))


def tools(task: Task) -> list[dict]:
    """Returns the tools that the task's server lists when it is first started. ValueError like `listed`."""
    return listed(Spec.of(task.scenario))


def listed(spec: Spec) -> list[dict]:
    """Returns the tools of a server. ValueError, in one sentence, where it does not start or offers none."""
    from coevolve_jax.envs.mcp import answers, client, world

    try:
        return world.listed(spec)
    except (client.Failed, answers.Unfit) as error:
        raise ValueError(f"The server {spec.command!r} {error}.") from None


def make() -> Environment:
    from coevolve_jax.envs.mcp import environment

    return environment.Environment()


def warm_up() -> None:
    """Starts the launcher, so that no call waits for it."""
    from coevolve_jax.envs.mcp import servers

    servers.launcher()
