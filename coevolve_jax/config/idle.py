"""Settings that have no effect under the rest of a config.

RULES has every key that can be without effect whatever its value, with when and why. VALUES has values that
have no effect where others of their key have one. Both leave out what the rollouts decide
(learner.pack_length_buckets). REMARKS has settings that change a run, but not as their names say.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from coevolve_jax import shipped
from coevolve_jax.config import keys, methods


@dataclasses.dataclass(frozen=True)
class Run:
    """The facts that a rule looks at.

    reads: the result of `methods.reads`. experts: whether the model has some; None where its folder does not
    say. fresh: D_t holds no task that evolution made; False also where that is unknown.
    """

    config: ConfigDict
    reads: Collection[str] | None
    experts: bool | None
    fresh: bool

    @property
    def static(self) -> bool:
        """D_t does not grow."""
        return self.reads is not None and "evolution.every" not in self.reads


class Rule(NamedTuple):
    """A condition under which some keys have no effect.

    keys: each with its silent values. A silent value gets no note: configs/ has it, or it switches off what
    is off. The default is always silent. None: every value gets a note. when: the condition. why: completes
    the sentence "config.KEY = VALUE has no effect: ".
    """

    keys: Mapping[str, tuple | None]
    when: Callable[[Run], bool]
    why: str


def _uses_kl(c: ConfigDict) -> bool:
    return c.learner.kl != "none" and c.learner.kl_coef > 0


def _ratio_is_one(c: ConfigDict) -> bool:
    return c.learner.tis_cap > 0 and c.learner.epochs == 1 and not c.rollout.max_staleness


def _leaves_out_no_spread(c: ConfigDict) -> bool:
    """Whether groups without spread are left out even without the group filter."""
    return c.learner.skip_zero_variance_groups or c.learner.dynamic_sampling > 0


def _groups(c: ConfigDict) -> int:
    """Groups that the run rolls out, at most."""
    return c.steps * c.rollout.tasks_per_step * (1 + c.learner.dynamic_sampling)


def _all_by_rules(c: ConfigDict) -> bool:
    """An explorer with a model of its own, which leaves every part to the rules."""
    return all(c.explorer.get(part) == "scripted" for part in methods.PARTS)


LAUNCHED: dict[str, tuple] = {
    "engine.servers": (), "engine.python": (), "engine.arguments": (), "engine.restarts": (),
}  # fmt: skip
SERVED: dict[str, tuple] = {
    **LAUNCHED, "engine.url": (), "engine.push": (), "engine.push_folder": (), "engine.push_timeout": (),
    "engine.push_exact": (), "engine.timeout": (1200.0,), "engine.attempts": (), "engine.patience": (900.0,),
}  # fmt: skip

RULES = (
    Rule(
        {"learner.clip_low": (), "learner.clip_high": ()},
        lambda r: _ratio_is_one(r.config),
        "config.learner.tis_cap is above 0, config.learner.epochs is 1 and config.rollout.max_staleness is "
        "0, so every ratio is exactly 1; config.learner.tis_cap bounds the weights instead",
    ),
    Rule(
        {"learner.surrogate": ()},
        lambda r: _ratio_is_one(r.config) and "." not in r.config.learner.surrogate,
        "config.learner.tis_cap is above 0, config.learner.epochs is 1 and config.rollout.max_staleness is "
        "0, so every ratio is exactly 1, where all of ours have the same gradient",
    ),
    Rule(
        {"learner.constant_length": ()},
        lambda r: r.config.learner.aggregate != "constant",
        "config.learner.aggregate is not constant",
    ),
    Rule(
        {"learner.kl_bound": (0.0,)},
        lambda r: not _uses_kl(r.config),
        "config.learner.kl is none or config.learner.kl_coef is 0, so the loss has no KL term",
    ),
    Rule(
        {"learner.kl_bound": (0.0,)},
        lambda r: _uses_kl(r.config) and r.config.learner.kl == "k1",
        "config.learner.kl is k1, which is a straight line without it",
    ),
    Rule(
        {"learner.kl_coef": (0.01, 0.0)},
        lambda r: r.config.learner.kl == "none",
        "config.learner.kl is none",
    ),
    Rule(
        {"learner.kl": ("none",)},
        lambda r: r.config.learner.kl_coef == 0,
        "config.learner.kl_coef is 0",
    ),
    Rule(
        {"learner.decay_steps": (), "learner.final_rate": ()},
        lambda r: r.config.learner.schedule == "constant",
        "config.learner.schedule is constant",
    ),
    Rule(
        {"learner.schedule": (), "learner.decay_steps": ()},
        lambda r: r.config.learner.final_rate == 1,
        "config.learner.final_rate is 1, so the rate stays as it is",
    ),
    Rule(
        {"learner.decay_embeddings": ()},
        lambda r: r.config.learner.weight_decay == 0,
        "config.learner.weight_decay is 0",
    ),
    Rule(
        {"learner.decay_embeddings": ()},
        lambda r: r.config.learner.lora_rank > 0,
        "config.learner.lora_rank is above 0, and adapters alone are trained",
    ),
    Rule(
        {"learner.skip_zero_variance_groups": ()},
        lambda r: r.config.learner.dynamic_sampling > 0 or r.config.learner.group_filter,
        "config.learner.dynamic_sampling and config.learner.group_filter leave groups without spread out by "
        "themselves",
    ),
    Rule(
        {"learner.group_filter": ()},
        lambda r: _leaves_out_no_spread(r.config) and r.config.learner.filter_keep == 1,
        "config.learner.filter_keep is 1, so all groups with spread stay",
    ),
    Rule(
        {"learner.group_filter": ()},
        lambda r: _leaves_out_no_spread(r.config) and r.config.learner.filter_warmup >= _groups(r.config),
        "the run ends before config.learner.filter_warmup groups are seen",
    ),
    Rule(
        {f"learner.filter_{key}": () for key in ("side", "z", "keep", "decay", "warmup")},
        lambda r: not r.config.learner.group_filter,
        "config.learner.group_filter is False",
    ),
    Rule(
        {"learner.lora_alpha": (), "learner.lora_targets": ()},
        lambda r: r.config.learner.lora_rank == 0,
        "config.learner.lora_rank is 0",
    ),
    Rule(
        {"learner.router_balance": ()},
        lambda r: r.experts is False,
        "the model has no experts",
    ),
    Rule(
        {f"warm_start.{key}": () for key in keys.WARM_START if key != "steps"},
        lambda r: r.config.warm_start.steps == 0,
        "config.warm_start.steps is 0",
    ),
    Rule(
        {"warm_start.tasks": ()},
        lambda r: bool(r.config.warm_start.source),
        "config.warm_start.source gives the tasks, all of them",
    ),
    Rule(
        {"warm_start.eval_every": (), "warm_start.patience": ()},
        lambda r: r.config.warm_start.held_out == 0,
        "config.warm_start.held_out is 0, so no loss is measured",
    ),
    Rule(
        {"warm_start.success_every": ()},
        lambda r: r.config.warm_start.eval_tasks == 0,
        "config.warm_start.eval_tasks is 0",
    ),
    Rule(
        {"data.sampling_floor": ()},
        lambda r: r.config.data.sampling == "uniform",
        "config.data.sampling is uniform",
    ),
    Rule(
        {"data.leak_embedding_threshold": ()},
        lambda r: not r.config.data.leak_embedding,
        "config.data.leak_embedding names no model",
    ),
    Rule(
        {"data.initial_tasks": ()},
        lambda r: bool(r.config.data.initial_file) and "testbed" not in r.config,
        "config.data.initial_file gives D_0, all of its tasks",
    ),
    Rule(
        {"data.initial_tasks": ()},
        lambda r: bool(r.config.data.own_tasks),
        "config.data.own_tasks gives D_0, all of its tasks",
    ),
    Rule(
        {"data.max_tasks": ()},
        lambda r: r.static and not (r.config.data.initial_file or r.config.data.own_tasks),
        "the strategy {strategy} does not let the training set grow",
    ),
    Rule(
        {"data.min_evolved_share": (0.5,)},
        lambda r: r.static and r.fresh,
        "the strategy {strategy} does not let the training set grow",
    ),
    *(
        Rule(
            {key: silent},
            lambda r, key=key: key in methods.ignores(r.config),
            "the strategy {strategy} decides it by itself",
        )
        for key, silent in (
            ("data.sampling", ()), ("data.sampling_floor", ()), ("data.retire_after", ()),
            ("data.min_evolved_share", (0.5,)),
        )
    ),
    *(
        Rule(
            {key: silent},
            lambda r, key=key: r.reads is not None and key not in r.reads,
            "the strategy {strategy} does not read it",
        )
        for key, silent in (
            ("evolution.every", ()), ("evolution.async_steps", ()), ("evolution.freeze_last_steps", ()),
            ("evolution.tasks", ()), ("evolution.contexts", ()), ("signals.window", ()),
            ("signals.rare_percent", (1.0,)),
        )
    ),
    Rule(
        {"evolution.executions": (), "explorer.calibration": (0,)},
        lambda r: not r.config.evolution.validate,
        "config.evolution.validate is False",
    ),
    Rule(
        {"explorer.calibration": (0,)},
        lambda r: r.config.explorer.get("validator") == "scripted",
        "config.explorer.validator is scripted, and the rules have no opinion on a proposal",
    ),
    Rule(
        {"explorer.solve": ()},
        lambda r: r.config.explorer.get("explorer") == "scripted",
        "config.explorer.explorer is scripted, and the rules read no user's words",
    ),
    Rule(
        {"evaluation.num_rollouts": (), "evaluation.last_rollouts": ()},
        lambda r: r.config.evaluation.temperature == 0,
        "config.evaluation.temperature is 0, so the rollouts of a task are alike",
    ),
    Rule(
        {"evaluation.balanced_candidates": ()},
        lambda r: r.config.evaluation.balanced_tasks == 0,
        "config.evaluation.balanced_tasks is 0",
    ),
    Rule(
        {"logging.trajectories_every": ()},
        lambda r: r.config.logging.trajectories == 0,
        "config.logging.trajectories is 0",
    ),
    Rule(
        {"engine.sharded": (), "engine.matmul_dtype": (), "engine.cache_tokens": (2**20, 2**21)},
        lambda r: r.config.engine.name != "native",
        "it is the in-process engine's, and config.engine.name is not native",
    ),
    Rule(
        {"engine.sharded": ()},
        lambda r: math.prod(r.config.mesh.values()) == 1,
        "config.mesh has one device",
    ),
    Rule(
        SERVED,
        lambda r: r.config.engine.name == "native",
        "it is of servers, and config.engine.name is native",
    ),
    Rule(
        LAUNCHED,
        lambda r: r.config.engine.name == "sglang" and bool(r.config.engine.url),
        "config.engine.url names servers that run already, so none is launched",
    ),
    Rule(
        {"engine.push_folder": ()},
        lambda r: r.config.engine.push == "distributed",
        "config.engine.push is distributed",
    ),
    *(
        Rule(
            {f"environment.{key}": None},
            lambda r, families=families: r.config.environment.name in keys.FAMILIES.keys() - families,
            f"it is a setting of the environment {' and '.join(sorted(families))}",
        )
        for key in dict.fromkeys(key for settings in keys.FAMILIES.values() for key in settings)
        for families in [{name for name, settings in keys.FAMILIES.items() if key in settings}]
    ),
    Rule(
        {f"explorer.{key}": () for key in ("timeout", "attempts", "patience", "key_variable")},
        lambda r: bool(r.config.explorer.get("offline")),
        "config.explorer.offline is True, so no server is asked",
    ),
    Rule(
        {"explorer.budget_money": ()},
        lambda r: r.config.explorer.get("price_in") == r.config.explorer.get("price_out") == 0,
        "config.explorer.price_in and price_out are 0, so nothing is ever spent",
    ),
    Rule(
        {f"explorer.{key}": () for key in (
            "base_url", "model", "key_variable", "temperature", "max_tokens", "max_length", "json_schema",
            "timeout", "attempts", "patience", "concurrency", "max_bytes", "price_in", "price_out",
            "budget_tokens", "budget_money", "cache", "offline",
        )},
        lambda r: _all_by_rules(r.config),
        "every part of the explorer is scripted, so no model is asked",
    ),
    Rule(
        {f"explorer.{key}": () for key in ("wording_attempts", "temperature", "max_tokens", "max_length")},
        lambda r: r.config.explorer.get("wording") in ("rules", "varied"),
        "config.explorer.wording is not policy, so no model is asked",
    ),
)  # fmt: skip

# key -> (whether its value has no effect, why: as in `Rule`).
VALUES: dict[str, tuple[Callable[[ConfigDict], bool], str]] = {
    "evaluation.every": (
        lambda c: c.evaluation.every >= c.steps,
        "config.steps are not more, so no evaluation comes on the way",
    ),
    "checkpoint.every": (
        lambda c: c.checkpoint.every > c.steps,
        "config.steps are fewer, so nothing is saved before the end",
    ),
    "warm_start.success_every": (
        lambda c: 0 < c.warm_start.steps < c.warm_start.success_every,
        "config.warm_start.steps are fewer",
    ),
    "warm_start.patience": (
        lambda c: 0 < c.warm_start.steps <= c.warm_start.patience * c.warm_start.eval_every,
        "config.warm_start.steps are over before so many measurements, one every "
        "config.warm_start.eval_every updates",
    ),
    **{
        f"health.{key}": (lambda c, key=key: c.health[key] > 1, "it bounds a share, which is at most 1")
        for key in ("zero_variance_groups", "truncated", "malformed", "invalid")
    },
}


def _updates(c: ConfigDict) -> int:
    """Returns the number of updates of RL, at most."""
    return c.steps * c.learner.epochs


def _adapters_drown(c: ConfigDict, rate: float, updates: int) -> bool:
    """Whether bfloat16 rounds off all that adapters can change in so many updates.

    Adam moves the numbers of B by up to the learning rate in an update, and those of A have variance 1 / in.
    So U updates change a kernel by some alpha / sqrt(rank) * rate * U of its own size. Half a step of
    bfloat16 is 1/512 to 1/256 of a number.
    """
    own = c.learner
    if not own.lora_rank or "bfloat16" not in (own.dtype, c.engine.dtype):
        return False
    return own.lora_alpha / own.lora_rank**0.5 * rate * updates < 1 / 256


_DROWN = (
    " = {rate} changes most numbers that have adapters by less than bfloat16 can tell in all of its updates, "
    "so that the policy hardly changes where config.learner.dtype ({learner.dtype}) or config.engine.dtype "
    "({engine.dtype}) is that: set both to float32, or raise the rate."
)
Remarks = tuple[tuple[Callable[[ConfigDict], bool], str], ...]  # when, and a sentence for the user
REMARKS: Remarks = (
    (
        lambda c: (
            c.warm_start.steps > 0 and _adapters_drown(c, c.warm_start.learning_rate, c.warm_start.steps)
        ),
        "config.warm_start.learning_rate" + _DROWN.replace("rate}", "warm_start.learning_rate}"),
    ),
)
REMARKS_OF_RL: Remarks = (
    (
        lambda c: _uses_kl(c) and c.learner.kl == "k1",
        "config.learner.kl_coef = {learner.kl_coef} weighs noise: the gradient of config.learner.kl=k1 is "
        "the same for every reference and zero in the mean, so nothing pulls to the start; use k2 or k3.",
    ),
    (
        lambda c: c.learner.warmup_steps > _updates(c),
        "config.learner.warmup_steps = {learner.warmup_steps} are more than the updates of the run, so the "
        "rate ends below config.learner.learning_rate.",
    ),
    (
        lambda c: _adapters_drown(c, c.learner.learning_rate, _updates(c)),
        "config.learner.learning_rate" + _DROWN.replace("rate}", "learner.learning_rate}"),
    ),
)


def idle(config: ConfigDict, fresh: bool = True) -> dict[str, str]:
    """Keys of a run's config that have no effect, whatever their values, and why. fresh: see `Run`."""
    return {key: _why(config, rule) for rule, key in _rules(config, fresh)}


def notes(config: ConfigDict, fresh: bool = True, rl: bool = True) -> list[str]:
    """A sentence for each value that has no effect, unless it is the default, and REMARKS that apply.

    rl: whether RL follows, so that REMARKS_OF_RL are told too.
    """
    found = {}
    for rule, key in _rules(config, fresh):
        value, silent = _value(config, key), rule.keys[key]
        if silent is None or value not in (_default(config, key), *silent):
            found[key] = f"config.{key} = {value!r} has no effect: {_why(config, rule)}."
    for key, (without, why) in VALUES.items():
        if (value := _value(config, key)) != _default(config, key) and key not in found and without(config):
            found[key] = f"config.{key} = {value!r} has no effect: {why}."
    remarks = (*REMARKS, *(REMARKS_OF_RL if rl else ()))
    return [*found.values(), *(remark.format_map(config) for applies, remark in remarks if applies(config))]


def _rules(config: ConfigDict, fresh: bool) -> Iterator[tuple[Rule, str]]:
    run = Run(config, methods.reads(config), _experts(config.model), fresh)
    for rule in RULES:
        there = [key for key in rule.keys if _value(config, key) is not None]
        if there and rule.when(run):
            yield from ((rule, key) for key in there)


def _why(config: ConfigDict, rule: Rule) -> str:
    return rule.why.format(strategy=config.strategy.name)


def _value(config: ConfigDict, key: str) -> Any:
    """None where the config has no such key."""
    section, _, name = key.partition(".")
    return config.get(section, {}).get(name)


def _default(config: ConfigDict, key: str) -> Any:
    """An explorer's own settings have their defaults in its module."""
    section, _, name = key.partition(".")
    own = section == "explorer"
    return methods.explorer(config.explorer.name).get(name) if own else keys.REQUIRED[key].default


def _experts(model: str) -> bool | None:
    try:
        found = json.loads((shipped.folder(model) / "config.json").read_text())
        return any(found.get(name) for name in ("num_experts", "num_local_experts"))
    except (OSError, ValueError, AttributeError):
        return None
