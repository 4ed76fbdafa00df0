"""Folders of JSON tables with tool code, in the format of Agent-World (arXiv 2604.18292), as a family.

An environment of that format is a folder of tables, ID/, beside a file ID_step4_checkpoint.json with the
tools and their code. config.environment.template names the folder of them all; splits are found as for
envs/mcp. Each world is a copy of the tables with a server process (server.py) that runs the code.
So everything but this reader is envs/mcp, its confinement too.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coevolve_jax.envs import mcp
from coevolve_jax.envs.base import Environment
from coevolve_jax.envs.mcp import templates, values
from coevolve_jax.envs.mcp.spec import Spec
from coevolve_jax.types import Call, Task, Turn

CHECKPOINT = "_step4_checkpoint.json"
NOON = "2026-01-01T12:00:00"  # the time of all worlds, unless config.environment.freeze_time names another


def scenarios(split: str, settings: Mapping[str, Any], apart_from: str = "") -> list[Task]:
    """Returns one scenario for each environment of a split. apart_from: a split that is left out.

    Without folders for the splits, each environment is in all of them. ValueError where one cannot be served.
    """
    left_out = {path.name for path in _of_split(settings, apart_from)} if apart_from else set()
    if not templates.split_folders(templates.root(settings)):
        left_out = set()
    found = []
    for path in _of_split(settings, split):
        if path.name not in left_out:
            own = {"freeze_time": settings.get("freeze_time") or NOON, "command": "", "template": str(path)}
            scenario = {k: v for k, v in Spec.of({**settings, **own}).scenario().items() if k != "command"}
            bare = Task(f"{split}_{path.name}", "folder_tools", scenario)
            known = values.of_template(path, tools(bare))
            scenario |= {"values": known} if known else {}
            found.append(bare)
    return found


def _of_split(settings: Mapping[str, Any], split: str) -> list[Path]:
    """Returns the folders of tables of a split. ValueError where there are none."""
    root = templates.root(settings)
    if split not in templates.SPLITS:
        raise ValueError(f"There is no split {split!r}: use one of {', '.join(templates.SPLITS)}.")
    folder = root / split if templates.split_folders(root) else root
    names = sorted(p.name.removesuffix(CHECKPOINT) for p in folder.glob(f"*{CHECKPOINT}"))
    found = [folder / name for name in names if (folder / name).is_dir()]
    if not found:
        raise ValueError(
            f"{folder} holds no environment in Agent-World's format: each is a folder ID of JSON tables "
            f"beside a file ID{CHECKPOINT}."
        )
    return found


def tasks(split: str, settings: Mapping[str, Any]) -> list[Task]:
    """Returns the published questions (questions/ID.json), with their verified tool chains as references."""
    made = []
    for bare in scenarios(split, settings):
        path = Path(bare.scenario["template"])
        questions = path.parent / "questions" / f"{path.name}.json"
        if questions.exists():
            made += [
                Task(f"{bare.id}_{n}", "folder_tools", bare.scenario, (turn,))
                for n, turn in enumerate(_turns(questions))
            ]
    return made


def _turns(path: Path) -> list[Turn]:
    try:
        return [
            Turn(
                told["task"],
                tuple(
                    Call(step["tool"], step["args"]) for step in told["grading_rubric"]["verified_tool_chain"]
                ),
            )
            for told in json.loads(path.read_text(encoding="utf-8"))["tasks"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no questions in Agent-World's format ({error!r}): mend it.") from None


def spec(scenario: Mapping[str, Any]) -> Spec:
    """Returns the server of a scenario: server.py with the environment's checkpoint."""
    server = Path(__file__).with_name("server.py")
    words = [sys.executable, "-P", "-s", str(server), f"{scenario['template']}{CHECKPOINT}"]
    return Spec.of({**scenario, "command": f"MCP_DB_DIR={{world}} {shlex.join(words)}"})


def tools(task: Task) -> list[dict]:
    """Returns the tools of the task's environment. ValueError where they cannot be served."""
    return mcp.listed(spec(task.scenario))


def make() -> Environment:
    from coevolve_jax.envs.mcp import environment

    return environment.Environment(spec)


warm_up = mcp.warm_up
