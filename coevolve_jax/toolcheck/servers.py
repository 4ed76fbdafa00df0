"""Servers, whose worlds are folders of files: which files calls change, and whether one server serves all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from coevolve_jax.config import keys
from coevolve_jax.envs import family
from coevolve_jax.envs.base import Broken
from coevolve_jax.types import Call, Task

Content = Mapping[str, str]  # the digest of each file by its path


def used(config: ConfigDict) -> bool:
    """Says whether the tools are those of a server."""
    return "reuse_server" in keys.FAMILIES.get(config.environment.name, ())


def started(config: ConfigDict) -> bool:
    """Says whether each world starts a server of its own."""
    return used(config) and not config.environment.get("reuse_server")


def reusing(task: Task) -> Task:
    """Returns the task with a server that serves one world after the other."""
    return dataclasses.replace(task, scenario={**task.scenario, "reuse_server": True})


def contents(config: ConfigDict, task: Task, calls: Sequence[Call]) -> list[Content]:
    """Returns the content of a world's folder at its begin and after each call. [{}] without a server."""
    if not used(config):
        return [{}]
    world = family.module(config.environment.name).make()
    try:
        world.reset(task)
        found = [world.state()]
        for call in calls:
            world.step(call)
            found.append(world.state())
        world.close()
    except Broken:  # these calls have worked before: the machine is to blame
        return [{}]
    return found


def differing(one: Content, other: Content) -> list[str]:
    """Returns the paths whose files differ."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def logs(config: ConfigDict, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> list[str]:
    """Returns the paths that each call of the first job changes, but for calls that change nothing."""
    found = contents(config, *jobs[0]) if jobs else []
    changed = [set(paths) for pair in zip(found, found[1:]) if (paths := differing(*pair))]
    return sorted(set.intersection(*changed)) if changed else []
