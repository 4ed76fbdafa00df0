"""The checks of a config, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from coevolve_jax import names
from coevolve_jax.config import keys, kinds, methods, schedule
from coevolve_jax.config.loading import find
from coevolve_jax.diagnosis import rewards


class Rule(NamedTuple):
    """A rule that needs several keys.

    key: the one whose value is refused. must: completes "config.KEY is VALUE: it must be "; {SECTION.KEY}
    stands for that value.
    """

    key: str
    holds: Callable[[ConfigDict], object]
    must: str


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _rows(c: ConfigDict) -> tuple[int, ...]:
    return (c.learner.pack_length, *c.learner.pack_length_buckets)


def _probes(c: ConfigDict) -> int:
    return c.strategy.get("probe", 0)  # a strategy of somebody else's has no such setting


def _admits_by_probes(c: ConfigDict) -> bool:
    """Whether strategy.probe is that of `growth.solvable`, which is off by default."""
    return methods.strategy(c.strategy.name).get("probe") == 0


RULES = (
    *(
        Rule(
            f"explorer.{part}",
            lambda c, part=part: c.explorer.get(part, "scripted") in (c.explorer.name, "scripted"),
            "{explorer.name} or scripted",
        )
        for part in methods.PARTS
    ),
    Rule(
        "data.max_tasks",
        lambda c: c.data.max_tasks == 0 or c.data.max_tasks >= c.data.initial_tasks,
        "0, or at least config.data.initial_tasks ({data.initial_tasks})",
    ),
    Rule(
        "data.own_tasks",
        lambda c: not c.data.own_tasks or not (c.data.initial_file or "testbed" in c),
        "False where config.data.initial_file or config.testbed gives D_0",
    ),
    Rule(
        "testbed.most",
        lambda c: "testbed" not in c or c.testbed.least <= c.testbed.most,
        "at least config.testbed.least ({testbed.least})",
    ),
    Rule(
        "testbed.candidates",
        lambda c: "testbed" not in c or c.data.initial_file or c.testbed.candidates >= c.data.initial_tasks,
        "at least config.data.initial_tasks ({data.initial_tasks}), which are chosen from them",
    ),
    Rule(
        "data.leak_embedding_threshold",
        lambda c: not c.data.leak_embedding or c.data.leak_embedding_threshold > 0,
        "a cosine above 0 where config.data.leak_embedding names a model",
    ),
    Rule(
        "data.min_calls",
        lambda c: c.data.min_calls <= c.data.max_calls,
        "at most config.data.max_calls ({data.max_calls})",
    ),
    Rule(
        "rollout.max_new_tokens",
        lambda c: c.rollout.max_new_tokens < c.rollout.max_length,
        "below config.rollout.max_length ({rollout.max_length}), which a prompt must fit in too",
    ),
    Rule(
        "evaluation.max_length",
        lambda c: (
            (c.evaluation.max_new_tokens or c.rollout.max_new_tokens)
            < (c.evaluation.max_length or c.rollout.max_length)
        ),
        "above config.evaluation.max_new_tokens ({evaluation.max_new_tokens}), where 0 stands for the value "
        "of config.rollout ({rollout.max_length} and {rollout.max_new_tokens})",
    ),
    Rule(
        "learner.lora_targets",
        lambda c: _is_pattern(c.learner.lora_targets),
        "a regular expression",
    ),
    Rule(
        "learner.pack_length",
        lambda c: c.learner.pack_length >= c.rollout.max_length,
        "at least config.rollout.max_length ({rollout.max_length})",
    ),
    Rule(
        "learner.pack_length_buckets",
        lambda c: all(0 < length < c.learner.pack_length for length in c.learner.pack_length_buckets),
        "tokens of rows, each below config.learner.pack_length ({learner.pack_length})",
    ),
    Rule(
        "learner.decay_steps",
        lambda c: c.learner.schedule == "constant" or c.learner.decay_steps > c.learner.warmup_steps,
        "more than config.learner.warmup_steps ({learner.warmup_steps}) for a {learner.schedule} schedule",
    ),
    Rule(
        "learner.adam_b1",
        lambda c: c.learner.adam_b1 < 1,
        "below 1, for the mean of gradients to move",
    ),
    Rule(
        "learner.adam_b2",
        lambda c: c.learner.adam_b1**2 < c.learner.adam_b2 < 1,
        "below 1 and more than the square of config.learner.adam_b1 ({learner.adam_b1}), for steps to be "
        "bounded",
    ),
    Rule(
        "learner.adam_b2",
        lambda c: c.learner.moment_dtype == "float32" or c.learner.adam_b2 <= 0.99,
        "at most 0.99 with bfloat16 moments, which cannot hold smaller changes",
    ),
    Rule(
        "learner.param_dtype",
        lambda c: c.learner.param_dtype == "float32" or c.learner.learning_rate >= 1e-4,
        "float32 at so small a learning rate: bfloat16 weights would round the steps away",
    ),
    Rule(
        "learner.param_dtype",
        lambda c: (
            c.learner.param_dtype == "float32" or not c.warm_start.steps or c.warm_start.learning_rate >= 1e-4
        ),
        "float32 with config.warm_start.learning_rate = {warm_start.learning_rate}: bfloat16 weights would "
        "round so small steps away",
    ),
    Rule(
        "learner.rows_per_microbatch",
        lambda c: c.learner.rows_per_microbatch % (c.mesh.data * c.mesh.fsdp * c.mesh.expert) == 0,
        "a multiple of mesh.data * mesh.fsdp * mesh.expert ({mesh.data} * {mesh.fsdp} * {mesh.expert})",
    ),
    Rule(
        "learner.pack_length",
        lambda c: c.mesh.context == 1 or all(length % (2 * c.mesh.context) == 0 for length in _rows(c)),
        "a multiple of 2 * mesh.context (2 * {mesh.context}), as must config.learner.pack_length_buckets",
    ),
    Rule(
        "data.initial_tasks",
        lambda c: c.data.initial_tasks >= c.rollout.tasks_per_step,
        "at least config.rollout.tasks_per_step ({rollout.tasks_per_step})",
    ),
    Rule(
        "engine.push",
        lambda c: not c.rollout.max_staleness or (c.engine.name, c.engine.push) != ("sglang", "distributed"),
        "disk where rollouts run ahead: the update takes the weights that would be broadcast",
    ),
    Rule(
        "engine.sleep",
        lambda c: not c.engine.sleep or (c.engine.name == "sglang" and not c.rollout.max_staleness),
        "False unless servers generate (config.engine.name=sglang) and none does so during the update "
        "(config.rollout.max_staleness=0)",
    ),
    Rule(
        "evolution.async_steps",
        lambda c: 0 <= c.evolution.async_steps <= c.evolution.every,
        "between 0 and config.evolution.every ({evolution.every}) steps",
    ),
    Rule(
        "strategy.probe",
        lambda c: _probes(c) != 1 or not _admits_by_probes(c),
        "0, or at least 2: one rollout cannot both succeed and fail",
    ),
    Rule(
        "strategy.probe",
        lambda c: not (c.evolution.async_steps and _probes(c)) or "probe" in methods.needs(c),
        "0 where config.evolution.async_steps is above 0: the policy is another one by then",
    ),
    Rule(
        "evolution.async_steps",
        lambda c: not c.evolution.async_steps or not methods.asks_policy(c),
        "0 where the explorer is {explorer.name}, which asks the policy: it is another one by then",
    ),
    Rule(
        "budget.rollouts",
        lambda c: not c.budget.rollouts or not (c.rollout.max_staleness or c.evolution.async_steps),
        "0 unless config.rollout.max_staleness and config.evolution.async_steps are 0 (they are "
        "{rollout.max_staleness} and {evolution.async_steps}): they spend rollouts ahead of the step",
    ),
    Rule(
        "warm_start.source",
        lambda c: "testbed" not in c or not c.warm_start.steps or bool(c.warm_start.source),
        "a file of tasks where config.testbed has weak tools, which explored tasks would teach",
    ),
    Rule(
        "warm_start.eval_tasks",
        lambda c: not c.warm_start.eval_tasks or c.warm_start.held_out > 0,
        "0 where config.warm_start.held_out is 0, since it takes them from the demonstrations held out",
    ),
    Rule(
        "explorer.wording",
        lambda c: "wording" not in c.explorer or "wording" in methods.explorer(c.explorer.name),
        "absent where the explorer is {explorer.name}, which words its queries itself",
    ),
    Rule(
        "rollout.max_staleness",
        lambda c: "fresh" not in methods.needs(c) or not c.rollout.max_staleness,
        "0: strategy {strategy.name} draws each batch by what it learned from the one before",
    ),
    Rule(
        "rollout.max_staleness",
        lambda c: "help" not in methods.needs(c) or not c.rollout.max_staleness,
        "0: strategy {strategy.name} gives hints by what it learned from the batch before",
    ),
    Rule(
        "rollout.tool_call_format",
        lambda c: "macros" not in methods.needs(c) or c.rollout.tool_call_format != "python",
        "json or llama3: strategy {strategy.name} offers tools of its own, which blocks of code cannot call",
    ),
    Rule(
        "evolution.async_steps",
        lambda c: not methods.needs(c) & {"probe", "influence", "branch"} or not c.evolution.async_steps,
        "0: strategy {strategy.name} asks for rollouts while the training set evolves",
    ),
    Rule(
        "evolution.async_steps",
        lambda c: "ask" not in methods.needs(c) or not c.evolution.async_steps,
        "0: strategy {strategy.name} keeps what a model answers while the training set evolves",
    ),
    Rule(
        "learner.optimizer_offload",
        lambda c: "influence" not in methods.needs(c) or not c.learner.optimizer_offload,
        "False: strategy {strategy.name} scores tasks by Adam's moments on the devices",
    ),
    Rule(
        "engine.name",
        lambda c: "branch" not in methods.needs(c) or c.engine.name == "native",
        "native: strategy {strategy.name} trains copies of the policy, which this process must serve",
    ),
    Rule(
        "rollout.max_staleness",
        lambda c: "branch" not in methods.needs(c) or not c.rollout.max_staleness,
        "0: strategy {strategy.name} serves copies of the policy, from which rollouts ahead would be sampled",
    ),
    Rule(
        "evaluation.queries",
        lambda c: (
            "queries" not in methods.needs(c)
            or c.evaluation.queries >= c.rollout.tasks_per_step * (1 + c.learner.dynamic_sampling)
        ),
        "enough for a batch (config.rollout.tasks_per_step {rollout.tasks_per_step}, drawn up to 1 + "
        "{learner.dynamic_sampling} times): strategy {strategy.name} learns from these without their answers",
    ),
    Rule(
        "data.max_tasks",
        lambda c: (
            "queries" not in methods.needs(c)
            or not c.data.max_tasks
            or c.data.max_tasks >= c.data.initial_tasks + c.evaluation.queries
        ),
        "0, or room for config.data.initial_tasks ({data.initial_tasks}) and config.evaluation.queries "
        "({evaluation.queries}): strategy {strategy.name} adds the latter to D_t",
    ),
    Rule(
        "reward.terms",
        lambda c: rewards.size(c.reward.terms) < 1,
        "terms whose weights are below 1 together, without their signs, for success to be worth most",
    ),
    Rule(
        "evaluation.balanced_candidates",
        lambda c: c.evaluation.balanced_candidates >= c.evaluation.balanced_tasks,
        "at least config.evaluation.balanced_tasks ({evaluation.balanced_tasks}), better five times as many",
    ),
)


def check(config: ConfigDict) -> None:
    """Checks a whole config.

    Raises ValueError, in one sentence, for a missing or unknown key, an impossible value, or values that
    cannot work together.
    """
    check_values(config)
    _check_own_settings(config)
    _check_no_password(config)
    if config.data.leak_embedding:
        names.function(config.data.leak_embedding, "data.leak_embedding")
    if "." in config.learner.surrogate:
        names.function(config.learner.surrogate, "learner.surrogate")
    methods.trackers(config)
    for rule in RULES:
        if not rule.holds(config):
            kinds.refuse(rule.key, find(config, rule.key), rule.must.format_map(config))


def check_values(config: ConfigDict) -> None:
    """Checks keys and values one by one.

    Raises ValueError for a missing or unknown key, and for a value of another kind or out of bounds.
    """
    for section, specified in keys.SECTIONS.items():
        part = config.get(section)
        if part is not None or section in config:
            if not isinstance(part, Mapping | ConfigDict):
                first = next(iter(specified))
                raise ValueError(f"config.{section} is {part!r}: it must be a section, with the key {first}.")
    keys.check_names(config)
    there = set(keys.names(config))
    for name, key in keys.REQUIRED.items():
        if name not in there:
            raise ValueError(
                f"The config lacks the key {name}: start a config file from coevolve_jax.config.defaults()."
            )
        key.check(name, find(config, name))
    for name, key in keys.OPTIONAL.items():
        if name not in there and name.startswith("testbed.") and "testbed" in config:
            raise ValueError(
                f"The config lacks the key {name}: its section testbed has all of {', '.join(keys.TESTBED)}."
            )
        if name in there:
            key.check(name, find(config, name))


def check_evolution(config: ConfigDict, first: int = 0) -> None:
    """Checks the schedule of evolution for a run from step `first` on.

    Strategies that are not `scheduled` pass. Raises ValueError if the run never evolves, if its D_t has no
    room to grow, or if it ends before it draws the tasks made last.
    """
    if not methods.scheduled(config):
        return
    c, due, ahead = config.evolution, schedule.evolutions(config), config.rollout.max_staleness
    if c.freeze_last_steps <= ahead:
        must = (
            f"above config.rollout.max_staleness ({ahead}): what is born must be trained on, and the batches "
            "of that many steps are drawn already"
        )
        kinds.refuse("evolution.freeze_last_steps", c.freeze_last_steps, must)
    if not due or due[-1] < first:
        name = config.strategy.name
        least = (first // c.every + 1) * c.every + c.async_steps + c.freeze_last_steps
        raise ValueError(
            f"config.steps is {config.steps}, and from step {first} on strategy {name} first lets the "
            f"training set grow in a run of {least} (config.evolution.every, async_steps and "
            f"freeze_last_steps are {c.every}, {c.async_steps} and {c.freeze_last_steps}): raise it, lower "
            "one of these, or name the strategy static, which this run would be."
        )
    d0, room = config.data.initial_tasks, config.data.max_tasks
    if 0 < room <= d0 and not (config.data.initial_file or config.data.own_tasks):
        kinds.refuse("data.max_tasks", room, f"0, or above config.data.initial_tasks ({d0}), for D_t to grow")
    grown = (due[0] + 1) * config.rollout.tasks_per_step * config.rollout.group_size
    if 0 < config.budget.rollouts <= grown:
        must = f"above {grown}, which the batches take until the training set first grows, or 0 for no bound"
        kinds.refuse("budget.rollouts", config.budget.rollouts, must)


def _check_own_settings(config: ConfigDict) -> None:
    """Raises ValueError where a setting of the strategy or the explorer is lacking or of another kind.

    Also for one that a strategy or explorer of ours does not have.
    """
    for section, settings in (("strategy", methods.strategy), ("explorer", methods.explorer)):
        name = config[section].name
        if missing := set(settings(name)) - set(config[section]):
            raise ValueError(
                f"config.{section} lacks {', '.join(sorted(missing))}, settings of {name}: name the "
                f"{section} in the config file's argument (--config=FILE:{section}={name})."
            )
        # Whether explorer.wording may be there is a rule above.
        others = sorted(
            {key for key in config[section] if not key.startswith("wording")} - set(settings(name))
        )
        if others and "." not in name:
            raise ValueError(keys.foreign(section, name, others[0], settings(name)))
        for key, default in settings(name).items():
            kinds.check_kind(f"{section}.{key}", config[section][key], kinds.kind_of(default))
    there = set(keys.names(config))
    for name, key in keys.OWN.items():
        if name in there:
            key.check(name, find(config, name))


def check_several_runs(config: ConfigDict) -> None:
    """Raises ValueError where several runs of a config would share a folder of checkpoints or of weights."""
    for key in ("checkpoint.folder", "engine.push_folder"):
        if folder := find(config, key):
            raise ValueError(
                f"config.{key} is {folder!r}, which one run alone can use: leave it empty where several are "
                "made."
            )


def _check_no_password(config: ConfigDict) -> None:
    """Raises ValueError, without the secret, for an address with a password, which a run would write down."""
    for key in ("explorer.base_url", "harness_model.base_url", "engine.url"):
        section, name = key.split(".")
        if "@" in (url := config.get(section, {}).get(name, "")):
            variable = config[section].get("key_variable", "OPENAI_API_KEY")
            where = f"put the key into the environment variable {variable} (config.{section}.key_variable)"
            remedy = "let the server be reached without them" if section == "engine" else where
            raise ValueError(
                f"config.{key} holds a user or password before {url.rpartition('@')[2]!r}, and a run writes "
                f"its config down: leave them out, and {remedy}."
            )
