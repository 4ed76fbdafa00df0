"""Scores a model on a benchmark's own tasks, or on the held-out synthetic tasks of a run.

    python experiments/evaluate.py --model=models/tiny_qwen3 --benchmark=bfcl --split=development \\
        --output=score.json
    python experiments/evaluate.py --model=QWEN --benchmark=bfcl --split=test --protocol=official \\
        --category=base,miss_func,miss_param,long_context --num_rollouts=4 --temperature=0.7 \\
        --max_length=32768 --max_new_tokens=4096
    python experiments/evaluate.py --model=QWEN --benchmark=bfcl --split=development --protocol=official \\
        --category=simple,multiple,parallel,parallel_multiple --output=score.json
    python experiments/evaluate.py --workdir=runs/demo --benchmark=held_out --output=score.json
    python experiments/evaluate.py --workdir=runs/demo --model=OTHER --benchmark=held_out

The official checker scores BFCL tasks (docs/environments/bfcl.md). The report has avg@k and best@k. It also
names all that the score depends on: protocol, split, temperature, number of rollouts and package versions.
With --output, an evaluation that was interrupted goes on where the same command is given again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags

from coevolve_jax.config import command_line
from coevolve_jax.rollout.engine import EngineError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from coevolve_jax.envs.family import Family
    from coevolve_jax.loop.evaluate import Result
    from coevolve_jax.records.rollout_log import RolloutLog
    from coevolve_jax.types import Group, Task

DEFAULTS = "configs/bfcl_tiny.py"  # for settings that have no flag below
_MODEL = flags.DEFINE_string("model", None, "Hugging Face model folder; none: the run's policy.")
_WORKDIR = flags.DEFINE_string("workdir", None, "A finished run: its policy, and its held-out tasks.")
_BENCHMARK = flags.DEFINE_string(
    "benchmark", "bfcl", "The tasks: an environment family's own, by its name, or held_out."
)
_SPLIT = flags.DEFINE_string(
    "split",
    "development",
    "Split of the benchmark. BFCL: development, test (read it once only), evaluation (both), train, all, "
    "sequential_train, sequential_test.",
)
_CATEGORIES = flags.DEFINE_list(
    "category",
    [],
    "Parts of the benchmark, separated by commas; BFCL: base, miss_func, miss_param, long_context; of one "
    "turn: simple, multiple, parallel, parallel_multiple, and the same with live_ before it.",
)
_PROTOCOL = flags.DEFINE_string(
    "protocol",
    "",
    "A named protocol of the benchmark; BFCL: official, steps_30. None: prompts as in training, limits by "
    "the flags. For held_out, limits without a flag are the run's own.",
)
_SHOTS = flags.DEFINE_integer(
    "few_shot",
    0,
    "Worked examples before each task, from other tasks of the development half; BFCL's single-turn only.",
    lower_bound=0,
)
_PYTHON = flags.DEFINE_string(
    "python",
    "",
    "Interpreter of the environment family; none: this one, or that of a --workdir of the same family.",
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "JSON file to write; it must not exist. Until the end, FILE.rollouts.jsonl keeps the rollouts.",
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_ROLLOUTS = flags.DEFINE_integer("num_rollouts", 1, "Rollouts per task.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.", lower_bound=0)
_LENGTH = flags.DEFINE_integer("max_length", 4096, "Tokens of a trajectory, prompt included.", lower_bound=64)
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "Tokens of one assistant message.", lower_bound=1)
_FORMAT = flags.DEFINE_enum(
    "tool_call_format",
    "json",
    ["json", "llama3", "python"],
    "How the policy writes calls, as in config.rollout.",
)
_TIMEOUT = flags.DEFINE_float(
    "call_timeout",
    5.0,
    "Seconds of processor time that one call may take; none: 5, or those of a --workdir of the same family.",
    lower_bound=0.1,
)
_STEPS = flags.DEFINE_integer(
    "max_steps", 20, "Messages with calls per user turn; 20 is the benchmark's limit.", lower_bound=1
)
_OBSERVATION = flags.DEFINE_integer(
    "max_observation", 1000, "Characters of a tool result that the model reads.", lower_bound=1
)
_URL = flags.DEFINE_string(
    "url", "", "SGLang servers that generate, separated by commas; none: this process generates."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ("float32", "bfloat16"), "Type of the computation, also in the servers."
)
_FOLDER = flags.DEFINE_string(
    "push_folder", "", "Shared folder from which servers on other hosts read the weights."
)
_SLOTS = flags.DEFINE_integer("max_concurrency", 32, "Conversations at once.", lower_bound=1)

LIMITS = (_LENGTH, _NEW, _STEPS, _FORMAT, _OBSERVATION)  # of config.rollout
MALFORMED = {"answer": "answered with a tool error", "end_turn": "passed over; none left ends the turn"}


def run() -> None:
    """Plays the chosen tasks, prints the scores, and writes them where --output says."""
    check_flags()
    from coevolve_jax import build
    from coevolve_jax import config as configs
    from coevolve_jax.models import hf_io
    from coevolve_jax.planning import plan
    from coevolve_jax.records.files import write_text

    output = Path(_OUTPUT.value) if _OUTPUT.value else None
    if output:  # fail now, before anything is computed
        configs.check_new_file("output", output)
    trained = configs.of_run(_WORKDIR.value) if _WORKDIR.value else None
    folder = policy_folder(output)
    config = settings(folder, trained)
    family = build.family(config)
    tasks = chosen_tasks(config, family)
    build.check_tool_call_format(config, tasks)
    plan.check_context(config, hf_io.load_config(folder))
    played = play(config, family, tasks, output)
    report = scored(config, played)
    show(report, family, without_message(played.groups))
    if output and played.log:
        write_text(output, json.dumps(report, indent=1))
        played.log.remove()


def held_out() -> bool:
    """Whether the tasks are those that a run held out."""
    return _BENCHMARK.value == "held_out"


def check_flags() -> None:
    """Raises ValueError where flags do not go together."""
    if _MODEL.value is None and _WORKDIR.value is None:
        raise ValueError("Give --model or --workdir.")
    if _MODEL.value and _WORKDIR.value and not held_out():
        raise ValueError(
            f"Give --model or --workdir, not both: with --benchmark={_BENCHMARK.value} there is nothing else "
            "of a run to use than its policy."
        )
    if held_out() and _WORKDIR.value is None:
        raise ValueError("--benchmark=held_out needs --workdir: the held-out tasks are those of a run.")
    if held_out() and (_CATEGORIES.value or _PROTOCOL.value or given("split")):
        raise ValueError(
            "--category, --protocol and --split are a benchmark's: leave them out with --benchmark=held_out."
        )


def given(name: str) -> bool:
    """Whether the command names the flag, if there is such a flag."""
    return name in flags.FLAGS and bool(flags.FLAGS[name].present)


def policy_folder(output: Path | None) -> Path:
    """Returns the folder of the model. Raises ValueError if it is not there yet or would hold the output."""
    from coevolve_jax import shipped

    folder = Path(_MODEL.value or Path(_WORKDIR.value) / "policy")
    if not _MODEL.value and not folder.exists():
        raise ValueError(
            f"{folder} is not there, for that run has not ended: finish it with {shipped.command('train')} "
            f"--workdir={_WORKDIR.value}, or name --model."
        )
    if output and output.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--output={output} lies in the model's folder, whose content names the model: choose another."
        )
    return folder


def settings(folder: Path, trained: ConfigDict | None) -> ConfigDict:
    """Returns the config of the evaluation. Flags come first, then the run `trained`, then the defaults.

    A run's environment is taken if the tasks are of its family, its limits if they are its held-out tasks.
    """
    from coevolve_jax import build
    from coevolve_jax import config as configs

    config = configs.load_file(DEFAULTS, f"seed={_SEED.value},engine={'sglang' if _URL.value else 'native'}")
    config.model = str(folder)
    name = trained.environment.name if trained and held_out() else _BENCHMARK.value
    limits = {flag.name: flag.value for flag in LIMITS}
    world = {"python": _PYTHON.value, "call_timeout": _TIMEOUT.value}
    named = lambda values: {key: value for key, value in values.items() if given(key)}
    if trained and trained.environment.name == name:
        config.environment, world = trained.environment, named(world)
    if trained and held_out():
        own = dataclasses.asdict(build.evaluation_limits(trained))
        limits = own | {"tool_call_format": trained.rollout.tool_call_format} | named(limits)
    config.environment.update(name=name, **world)
    config.rollout.update(limits)
    config.engine.update(
        url=_URL.value,
        max_concurrency=_SLOTS.value,
        dtype=_DTYPE.value,
        push_folder=_FOLDER.value,
        timeout=600.0,
    )
    return config


def chosen_tasks(config: ConfigDict, family: Family) -> list[Task]:
    """Returns the tasks to play, and puts the limits that --protocol fixes into the config.

    Raises ValueError if there is none, or if a flag fits neither the tasks nor the protocol.
    """
    from coevolve_jax import config as configs
    from coevolve_jax.loop.initial import read_held_out

    chosen = family.settings(_CATEGORIES.value, _PROTOCOL.value) | configs.own_source(config.environment)
    chosen |= {"few_shot": _SHOTS.value, "seed": _SEED.value}
    config.rollout.update(fixed_by_protocol(family))
    tasks = read_held_out(Path(_WORKDIR.value)) if held_out() else family.tasks(_SPLIT.value, chosen)
    if not tasks:
        raise ValueError(no_tasks(config.environment.name))
    if _SHOTS.value and not any(task.examples for task in tasks):
        raise ValueError(
            f"--few_shot={_SHOTS.value}: {_BENCHMARK.value} has no worked examples, leave it out."
        )
    return tasks


class Played(NamedTuple):
    """Rollouts of all tasks.

    checked: what the benchmark's own checker says of them; None for held-out tasks.
    template: notes on the chat template. log: the file that keeps the rollouts until the scores are written.
    """

    result: Result
    groups: list[Group]
    checked: dict | None
    template: str
    software: dict[str, str]
    log: RolloutLog | None


def play(config: ConfigDict, family: Family, tasks: list[Task], output: Path | None) -> Played:
    """Plays all tasks. Raises ValueError if no prompt leaves room for a message."""
    from coevolve_jax import build
    from coevolve_jax.envs import base
    from coevolve_jax.loop import inputs
    from coevolve_jax.loop.evaluate import evaluate
    from coevolve_jax.records.rollout_log import RolloutLog

    policy, log = build.policy(Path(config.model)), None
    with build.env_pool(config) as env_pool, closing(build.engine(config, policy)) as engine:
        agent = build.agent(config, policy, engine, env_pool)
        sampling = {name: flags.FLAGS[name].value for name in ("num_rollouts", "temperature", "seed")}
        served = getattr(engine, "versions", {})
        software = inputs.versions(family.versions(), served, inputs.digests(config))
        about = {
            **sampling,
            "tasks": base.digest([task.to_json() for task in tasks]),
            "environment": config.environment.to_dict(),
            "rollout": config.rollout.to_dict(),
            "dtype": config.engine.dtype,
            "versions": software,
        }
        if output:
            log = RolloutLog(Path(f"{output}.rollouts.jsonl"), about, tasks, _ROLLOUTS.value)
        result, groups = evaluate(agent, tasks, **sampling, log=log)
        if without_message(groups) == len(tasks) * _ROLLOUTS.value:
            if log:
                log.remove()
            raise ValueError(
                f"No prompt and message of --max_new_tokens={config.rollout.max_new_tokens} fit into "
                f"--max_length={config.rollout.max_length}: raise the latter or lower the former."
            )
        checked = None if held_out() else family.report(groups, env_pool.judge)
    template = " ".join(policy.chat.notes) or "the tokenizer's"
    return Played(result, groups, checked, template, software, log)


def scored(config: ConfigDict, played: Played) -> dict:
    """Returns the report, as JSON holds it: the protocol, the scores, and all that they depend on."""
    from coevolve_jax.analysis import stats
    from coevolve_jax.analysis.scores import scores
    from coevolve_jax.envs import base
    from coevolve_jax.loop.evaluate import tally

    result, groups, checked, template, software, log = played
    tasks = [group.task for group in groups]
    counted: dict = dict(checked or {"alike": {t.id: t.lineage.parent or t.id for t in tasks}})
    kinds = {kind: name for name, kind in stats.SETS.items()}
    sets = {t.id: kinds.get(t.lineage.kind, "others") for t in tasks} if held_out() else {}
    if several := len(set(sets.values())) > 1:  # they say different things: no number is of all of them
        counted["categories"] = sets
        groups = [g for g in groups if sets[g.task.id] == "iid"]
        own = tally(groups, _ROLLOUTS.value, _TEMPERATURE.value)
        result = dataclasses.replace(own, by_task=result.by_task, slow_retries=result.slow_retries)
    parts, alike = counted.pop("categories", {}), counted.pop("alike", {})
    by_task = counted.get("by_task", result.by_task)
    rows = scores(by_task, _ROLLOUTS.value, parts, alike, together=not several)
    counts = [count for id, count in by_task.items() if not several or sets[id] == "iid"]
    solved, trials = (sum(count[i] for count in counts) for i in (0, 1))
    success = base.share(solved, trials, len(base.outcomes_of(groups)) - trials)
    if checked:  # the family may define success in another way
        success |= {key: checked[key] for key in ("success", "success_if_invalid_failed") if key in checked}
    as_evaluated = held_out() and not any(given(flag.name) for flag in LIMITS)
    return {
        "model": config.model,
        "protocol": {
            "benchmark": counted.pop("benchmark", "held-out synthetic tasks"),
            "split": _SPLIT.value if checked else f"held_out.jsonl of {_WORKDIR.value}",
            "scoring": counted.pop("scoring", "the environment's own grading"),
            "tasks": len(tasks),
            **({"success_of": "the i.i.d. set; scores and by_task have the others too"} if several else {}),
            "worked_examples": _SHOTS.value,
            "samples": _ROLLOUTS.value,
            "temperature": _TEMPERATURE.value,
            "seed": _SEED.value,
            **({"interruptions": log.interruptions} if log and log.interruptions else {}),
            "tool_call_format": config.rollout.tool_call_format,
            "chat_template": template,
            "limits": _PROTOCOL.value or ("as in the run's evaluations" if as_evaluated else "by the flags"),
            "steps_per_turn": config.rollout.max_steps,
            "messages": config.rollout.max_messages or "any number",
            "max_length": config.rollout.max_length,
            "max_new_tokens": config.rollout.max_new_tokens,
            "max_observation": config.rollout.max_observation,
            "call_timeout": config.environment.call_timeout,
            "worker_memory": config.environment.worker_memory,
            "dtype": config.engine.dtype,
            "malformed_calls": MALFORMED[config.rollout.malformed],
        },
        **success,
        "scores": rows,
        "official": counted if checked else None,
        "environment": result.to_json(),
        "versions": software,
    }


def show(report: dict, family: Family, silent: int) -> None:
    """Prints a report. silent: number of rollouts without room for a message (`without_message`)."""
    from coevolve_jax.analysis.scores import table

    for name, value in (report["protocol"] | family.versions()).items():
        print(f"{name:>16}  {value}")
    stops = report["environment"]["stops"].items()
    print(f"{'ended by':>16}  {', '.join(f'{stop} {count}' for stop, count in stops)}")
    if silent:
        print(f"{'':>16}  {silent} had no room for a message: raise --max_length or lower --max_new_tokens")
    success = "unknown" if report["success"] is None else f"{report['success']:.1%}"
    left_out = f"{report['invalid']} invalid ones left out"
    print(f"{'success':>16}  {success} of {report['trials']} rollouts; {left_out}")
    if "success_if_invalid_failed" in report:
        print(f"{'':>16}  {report['success_if_invalid_failed']:.1%} with these as failures")
    print(table(report["scores"], _ROLLOUTS.value))


def no_tasks(name: str) -> str:
    """Says why there is nothing to score. name: of the environment family."""
    if _CATEGORIES.value:
        return (
            f"--split={_SPLIT.value} has no tasks of --category={','.join(_CATEGORIES.value)}: choose "
            "another split or other categories; --help lists them."
        )
    remedy = "choose another split, or --benchmark=held_out for the tasks of a run."
    if name == "tools":
        remedy = f"let its class define get_reward(self) and return the request from reset, or {remedy}"
    return f"The environment {name} has no tasks of its own in --split={_SPLIT.value}: {remedy}"


def without_message(groups) -> int:
    """The number of rollouts whose prompt left no room for a message."""
    silent = lambda t: t.stop == "context_limit" and len(t.turn_starts) < 2 and not t.steps
    return sum(silent(t) for group in groups for t in group.trajectories)


def fixed_by_protocol(family) -> dict:
    """The values of config.rollout that --protocol fixes. Raises ValueError if another flag sets one."""
    fixed = dict(family.protocols.get(_PROTOCOL.value, {}))
    for name in filter(given, fixed):
        raise ValueError(f"--protocol={_PROTOCOL.value} fixes {name} at {fixed[name]}: leave out --{name}.")
    return fixed


if __name__ == "__main__":
    kept = "with --output, the same command goes on from its finished rollouts."
    command_line.start(run, FloatingPointError, EngineError, interrupted=kept)
