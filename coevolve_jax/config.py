"""Config files' arguments, checks that need the whole config, and its digest."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from coevolve_jax import config_kinds, names, schedule

FLOATS = ("float32", "bfloat16")
CHOICES = {
    "engine.name": ("native", "sglang"),
    "environment.backend": ("local", "ray"),
    "engine.push": ("disk", "distributed"),
    "data.sampling": ("uniform", "variance"),
    "rollout.malformed": ("answer", "end_turn"),
    "rollout.calls": ("json", "python"),
    "learner.advantage": ("group_std", "group_mean", "leave_one_out"),
    "learner.ratio": ("token", "sequence"),
    "learner.aggregate": ("token", "sequence", "constant"),
    "learner.kl": ("k1", "k2", "k3", "none"),
    "learner.schedule": ("constant", "cosine", "linear"),
    "learner.attention": ("auto", "plain", "chunked", "flash", "splash"),
    "engine.dtype": FLOATS,
    "learner.dtype": FLOATS,
    "learner.param_dtype": FLOATS,
    "learner.moment_dtype": FLOATS,
    "learner.moments_on": ("device", "host"),
}

# What a module that a config names may lack here.
REMEDY = (
    "install it (what explorer=llm and explorer=policy import comes with pip install 'coevolve_jax[llm]')"
)

# What an explorer whose section has these keys can leave to the scripted one: roles, and D_0 with the held-out tasks.
PARTS = ("reflector", "explorer", "abstractor", "validator", "initial")

# Keys and arguments of config files that have another name now.
RENAMED = {
    "evolution.mode": "strategy.name",
    "mode": "strategy",
    "rollout.ahead": "rollout.max_staleness",
    "engine.slots": "engine.max_concurrency",
}

# Keys that came later than runs which are to be gone on with and compared, with the values, as JSON has them, at which nothing is
# new.
LATER = {
    "environment.backend": "local",
    "data.initial_file": "",
    "evolution.overlap": 0,
    "data.leak_call_threshold": 0.0,
    "data.leak_query_threshold": 0.0,
    "data.leak_embedding": "",
    "data.leak_embedding_threshold": 0.0,
    "data.leak_splits": [],
    "evolution.executions": 1,
    "rollout.max_messages": 0,
    "rollout.malformed": "answer",
    "rollout.calls": "json",
    "engine.arguments": "",
    "engine.sharded": False,
    "engine.cache_tokens": 0,
    "engine.sleep": False,
    "checkpoint.folder": "",
    "learner.share_prompts": False,
    "learner.row_buckets": [],
    "mesh.context": 1,
    "learner.moments_on": "device",
    "strategy.probe": 0,  # of random
    "logging.trackers": "tensorboard",
}

# Where and how a run is served, not what it computes: they may change when a run goes on.
SERVING = (
    "environment.python",
    "environment.backend",
    "engine.url",
    "engine.servers",
    "engine.python",
    "engine.timeout",
    "engine.attempts",
    "engine.patience",
    "engine.restarts",
    "engine.push",
    "engine.push_folder",
    "engine.push_timeout",
    "engine.push_exact",
    "engine.sleep",
    "engine.cache_tokens",
    "explorer.base_url",
    "explorer.key_variable",
    "explorer.timeout",
    "explorer.attempts",
    "explorer.patience",
    "explorer.concurrency",
    "explorer.cache",
    "explorer.offline",
    "checkpoint.folder",
    "logging.trackers",
    "learner.moments_on",
)


def parse_arg(arg: str, **defaults) -> ConfigDict:
    """Parses "key=value,key=value" (what follows the colon of --config=file.py:...) by the defaults' types.

    Raises ValueError for a key without a default or a value that is not of its type.
    """
    values = ConfigDict(defaults)
    for item in filter(None, arg.split(",")):
        key, _, text = item.partition("=")
        if key in RENAMED:
            raise ValueError(f"Config argument {key!r} is called {RENAMED[key]!r} now.")
        if key not in defaults:
            raise ValueError(f"Config argument {key!r} is unknown: use {', '.join(sorted(defaults))}.")
        try:
            values[key] = type(defaults[key])(text)
        except ValueError:
            raise ValueError(
                f"Config argument {key}={text!r} is not of type {type(defaults[key]).__name__}."
            ) from None
    return values


def load_file(path: str | os.PathLike, arg: str = "") -> ConfigDict:
    """The config of a config file, as --config=PATH:ARG gives it."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{path} is no Python file: name one that defines get_config.")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.get_config(arg)


def of_run(workdir: str | os.PathLike) -> ConfigDict:
    """The config of a run that has begun. Raises ValueError where there is none."""
    if not (Path(workdir) / "config.json").exists():
        raise ValueError(
            f"{workdir} holds no run (no config.json): give a --config to begin one, or the workdir of a run."
        )
    config = ConfigDict(read(workdir))
    for key, value in LATER.items():
        section, name = key.split(".")
        if section in config and name not in config[section]:
            config[section][name] = value
    return config


def read(workdir: str | os.PathLike) -> dict[str, Any]:
    """A run's config.json as plain values. Raises ValueError, which names the file, where it holds none."""
    path = Path(workdir) / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): restore it, or choose another --workdir."
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no config: restore it, or choose another --workdir.")
    return found


def inherit(file: str, name: str, arg: str) -> ConfigDict:
    """The config of the file `name` beside the config file `file`, for one that changes some of its values."""
    return load_file(Path(file).with_name(name), arg)


def strategy(name: str) -> ConfigDict:
    """The `strategy` section for a strategy: its name and its own settings, which are DEFAULTS of its module."""
    return _named("strategies", name, "strategy.name")


def explorer(name: str) -> ConfigDict:
    """The `explorer` section, likewise."""
    return _named("explorers", name, "explorer.name")


def reads(config: ConfigDict) -> frozenset[str] | None:
    """The keys of `strategies.base.SHARED` that the strategy reads, READS of its module; None where it does not say."""
    module = names.module("strategies", config.strategy.name, "strategy.name", ["make"], remedy=REMEDY)
    told = getattr(module, "READS", None)
    return None if told is None else frozenset(told)


def scheduled(config: ConfigDict) -> bool:
    """Whether the strategy says that it evolves after the steps of `schedule.evolutions`, and no others."""
    return set(schedule.KEYS) <= (reads(config) or set())


def asks_policy(config: ConfigDict) -> bool:
    """Whether the explorer asks the policy that the run trains, and so needs its engine: its module has ASKS_POLICY."""
    if "explorer" not in config:
        return False
    module = names.module("explorers", config.explorer.name, "explorer.name", ["make"], remedy=REMEDY)
    return getattr(module, "ASKS_POLICY", False)


def trackers(config: ConfigDict) -> list[ModuleType]:
    """The modules that config.logging.trackers names, separated by commas."""
    told = config.logging.get("trackers", LATER["logging.trackers"])
    remedy = "install it (pip install 'coevolve_jax[wandb]'), or leave it out"
    return [
        names.module("records.trackers", name, "logging.trackers", ["make"], remedy)
        for name in filter(None, told.split(","))
    ]


def _named(room: str, name: str, key: str) -> ConfigDict:
    module = names.module(room, name, key, ["make"], remedy=REMEDY)
    return ConfigDict({"name": name, **getattr(module, "DEFAULTS", {})})


def override(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """A copy with some values replaced. values: by dotted key; another strategy.name or explorer.name brings the
    settings of that one. Raises ValueError for a key that is not there or a value of another type."""
    copied, values = ConfigDict(config.to_dict()), dict(values)
    if "strategy.name" in values:
        copied.strategy = strategy(values.pop("strategy.name"))
    if "explorer.name" in values:
        copied.explorer = explorer(values.pop("explorer.name"))
    for key, value in values.items():
        if key in RENAMED:
            raise ValueError(f"The config key {key!r} is called {RENAMED[key]!r} now.")
        *sections, name = key.split(".")
        section = copied
        for part in sections:
            section = section[part] if isinstance(section, ConfigDict) and part in section else None
        if not isinstance(section, ConfigDict) or name not in section:
            raise ValueError(
                f"The config has no key {key!r}: the keys and their meaning stand in the config file."
            )
        try:
            section[name] = value
        except TypeError as error:
            raise ValueError(f"config.{key} cannot be {value!r}: {error}.") from None
    return copied


def difference(theirs: Mapping, ours: Mapping, prefix: str = "config") -> str:
    """The first key in which two configs, as plain values, differ, with both values."""
    for key in sorted(theirs.keys() | ours.keys()):
        a, b = theirs.get(key, "nothing"), ours.get(key, "nothing")
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            return difference(a, b, f"{prefix}.{key}")
        if a != b:
            return f"{prefix}.{key} is {a!r} there and {b!r} here"
    return "equal"


def check_values(config: ConfigDict) -> None:
    """Raises ValueError, in one sentence, for a value of another kind, that is none of its CHOICES, or below its LEAST."""
    config_kinds.check(config)
    for key, choices in CHOICES.items():
        section, name = key.split(".")
        _require(config, config[section][name] in choices, key, f"one of {', '.join(choices)}")
    for key, least in LEAST.items():
        section, name = key.split(".") if "." in key else (None, key)
        value = (config[section] if section else config).get(name, least)
        _require(config, least <= value < math.inf, key, f"at least {least} and finite")


def _require(config: ConfigDict, ok: bool, key: str, rule: str) -> None:
    if not ok:
        section, _, name = key.rpartition(".")
        value = (config[section] if section else config)[name]
        raise ValueError(f"config.{key} is {value!r}: it must be {rule}.")


def check_evolution(config: ConfigDict, first: int = 0) -> None:
    """Raises ValueError where the strategy lets D_t grow, and a run from step `first` on never comes to that, or never draws
    what is born last. A strategy that is not `scheduled` is not looked at."""
    if not scheduled(config):
        return
    c, due = config.evolution, schedule.evolutions(config)
    _require(
        config,
        c.settle_steps > config.rollout.max_staleness,
        "evolution.settle_steps",
        f"above config.rollout.max_staleness ({config.rollout.max_staleness}): what is born must be trained on, and the "
        "batches of that many steps are drawn already",
    )
    if not due or due[-1] < first:
        overlap, name = c.get("overlap", 0), config.strategy.name
        least = (first // c.every + 1) * c.every + overlap + c.settle_steps
        raise ValueError(
            f"config.steps is {config.steps}, and from step {first} on strategy {name} first lets the training set grow in "
            f"a run of {least} (config.evolution.every, overlap and settle_steps are {c.every}, {overlap} and "
            f"{c.settle_steps}): raise it, lower one of these, or name the strategy static, which this run would be."
        )


def _require_no_password(config: ConfigDict) -> None:
    """Raises ValueError, without the secret, for an address that a run would write down together with a password."""
    for key in ("explorer.base_url", "engine.url"):
        section, name = key.split(".")
        if "@" in (url := config[section].get(name, "")):
            variable = config.explorer.get("key_variable", "OPENAI_API_KEY")
            where = f"put the key into the environment variable {variable} (config.explorer.key_variable)"
            remedy = where if section == "explorer" else "let the server be reached without them"
            raise ValueError(
                f"config.{key} holds a user or password before {url.rpartition('@')[2]!r}, and a run writes its config "
                f"down: leave them out, and {remedy}."
            )


def check(config: ConfigDict) -> None:
    """Raises ValueError, in one sentence, for values that cannot be, or cannot work together."""
    require = functools.partial(_require, config)
    config_kinds.check(config)  # first: what follows takes names for texts and sizes for numbers
    for section, defaults in (("strategy", strategy), ("explorer", explorer)):
        name = config[section].name
        if missing := set(defaults(name)) - set(config[section]):
            raise ValueError(
                f"config.{section} lacks {', '.join(sorted(missing))}, settings of {name}: name the {section} in the "
                f"config file's argument (--config=FILE:{section}={name})."
            )
        config_kinds.check_section(config, section, defaults(name))
    _require_no_password(config)
    name = config.explorer.name
    for part in PARTS:
        if part in config.explorer:
            allowed = config.explorer[part] in (name, "scripted")
            require(allowed, f"explorer.{part}", f"{name} or scripted")
    check_values(config)
    require(0 <= config.data.new_share <= 1, "data.new_share", "a share between 0 and 1")
    require(0 <= config.data.sampling_floor <= 1, "data.sampling_floor", "a weight between 0 and 1")
    require(
        config.data.max_tasks == 0 or config.data.max_tasks >= config.data.initial_tasks,
        "data.max_tasks",
        f"0, or at least config.data.initial_tasks ({config.data.initial_tasks})",
    )
    require(config.data.retire_after >= 0, "data.retire_after", "0 or more visits")
    for name in ("leak_call_threshold", "leak_query_threshold", "leak_embedding_threshold"):
        require(
            0 <= config.data.get(name, 0) <= 1, f"data.{name}", "a cosine above 0 and up to 1, or 0 for none"
        )
    require(0 < config.data.leak_threshold <= 1, "data.leak_threshold", "a cosine above 0 and up to 1")
    if model := config.data.get("leak_embedding"):
        names.function(model, "data.leak_embedding")
        rule = "a cosine above 0 where config.data.leak_embedding names a model"
        require(config.data.leak_embedding_threshold > 0, "data.leak_embedding_threshold", rule)
    for key in ("learner.max_grad_norm", "environment.call_timeout"):
        section, name = key.split(".")
        require(config[section][name] > 0, key, "above 0")
    require(
        config.data.min_calls <= config.data.max_calls,
        "data.min_calls",
        f"at most config.data.max_calls ({config.data.max_calls})",
    )
    rule = f"below config.rollout.max_length ({config.rollout.max_length}), which a prompt must fit in too"
    require(config.rollout.max_new_tokens < config.rollout.max_length, "rollout.max_new_tokens", rule)
    require(config.signals.rare_percent <= 100, "signals.rare_percent", "a percentage")
    require(config.learner.clip_low <= 1, "learner.clip_low", "at most 1: ratios are above 0")
    try:
        re.compile(config.learner.lora_targets)
    except re.error as error:
        require(False, "learner.lora_targets", f"a regular expression ({error})")
    require(config.rollout.group_size >= 2, "rollout.group_size", "at least 2, for a group to have a spread")
    require(config.rollout.temperature > 0, "rollout.temperature", "above 0: greedy rollouts have no spread")
    require(
        config.learner.row_length >= config.rollout.max_length,
        "learner.row_length",
        f"at least config.rollout.max_length ({config.rollout.max_length})",
    )
    learner = config.learner
    require(
        all(isinstance(n, int) and 0 < n < learner.row_length for n in learner.get("row_buckets", ())),
        "learner.row_buckets",
        f"tokens of rows, each below config.learner.row_length ({learner.row_length})",
    )
    for name in ("epochs", "constant_length", "rows_per_microbatch", "logprob_chunk"):
        require(learner[name] >= 1, f"learner.{name}", "at least 1")
    for name in (
        "kl_coef",
        "kl_bound",
        "tis_cap",
        "router_balance",
        "dynamic_sampling",
        "lora_rank",
        "warmup_steps",
        "final_rate",
    ):
        require(learner[name] >= 0, f"learner.{name}", "0 or more")
    require(
        learner.schedule == "constant" or learner.decay_steps > learner.warmup_steps,
        "learner.decay_steps",
        f"more than config.learner.warmup_steps ({learner.warmup_steps}) for a {learner.schedule} schedule",
    )
    require(0 < learner.learning_rate < float("inf"), "learner.learning_rate", "above 0 and finite")
    require(
        0 <= learner.adam_b1 and learner.adam_b1**2 < learner.adam_b2 < 1,
        "learner.adam_b2",
        f"below 1 and more than the square of config.learner.adam_b1 ({learner.adam_b1}), for steps to be bounded",
    )
    require(
        learner.moment_dtype == "float32" or learner.adam_b2 <= 0.99,
        "learner.adam_b2",
        "at most 0.99 with bfloat16 moments, which cannot hold smaller changes",
    )
    require(
        learner.param_dtype == "float32" or learner.learning_rate >= 1e-4,
        "learner.param_dtype",
        "float32 at so small a learning rate: bfloat16 weights would round the steps away",
    )
    parts = config.mesh.data * config.mesh.fsdp * config.mesh.expert
    require(
        learner.rows_per_microbatch % parts == 0,
        "learner.rows_per_microbatch",
        f"a multiple of mesh.data * mesh.fsdp * mesh.expert = {parts}",
    )
    context, lengths = config.mesh.get("context", 1), (learner.row_length, *learner.get("row_buckets", ()))
    require(
        context == 1 or all(length % (2 * context) == 0 for length in lengths),
        "learner.row_length",
        f"a multiple of 2 * mesh.context = {2 * context}, as must config.learner.row_buckets",
    )
    require(
        config.data.initial_tasks >= config.rollout.tasks_per_step,
        "data.initial_tasks",
        f"at least config.rollout.tasks_per_step ({config.rollout.tasks_per_step})",
    )
    require(config.rollout.max_messages >= 0, "rollout.max_messages", "0 or more")
    require(config.rollout.max_staleness >= 0, "rollout.max_staleness", "0 or more steps")
    for name in ("servers", "attempts"):
        require(config.engine[name] >= 1, f"engine.{name}", "at least 1")
    for name in ("timeout", "patience", "push_timeout"):
        require(config.engine[name] > 0, f"engine.{name}", "more than 0 seconds")
    require(
        not (
            config.rollout.max_staleness
            and config.engine.name == "sglang"
            and config.engine.push == "distributed"
        ),
        "engine.push",
        "disk where rollouts run ahead: the update takes the weights that would be broadcast",
    )
    require(
        not config.engine.get("sleep")
        or (config.engine.name == "sglang" and not config.rollout.max_staleness),
        "engine.sleep",
        "False unless servers generate (config.engine.name=sglang) and none does so during the update (config.rollout.max_staleness=0)",
    )
    require(config.engine.restarts >= 0, "engine.restarts", "0 or more")
    require(config.evolution.every >= 1, "evolution.every", "at least 1")
    overlap, probes = config.evolution.get("overlap", 0), config.strategy.get("probe", 0)
    if overlap:
        rule = f"between 0 and config.evolution.every ({config.evolution.every}) steps"
        require(0 <= overlap <= config.evolution.every, "evolution.overlap", rule)
        rule = "0 where config.evolution.overlap is above 0: the policy is another one by then"
        require(not probes, "strategy.probe", rule)
        rule = f"0 where the explorer is {config.explorer.name}, which asks the policy: it is another one by then"
        require(not asks_policy(config), "evolution.overlap", rule)
    if "executions" in config.evolution:
        rule = "at least 1; config.evolution.validate=False is the ablation without execution"
        require(config.evolution.executions >= 1, "evolution.executions", rule)
    require(
        config.evolution.settle_steps >= 1,
        "evolution.settle_steps",
        "at least 1: what is born must be trained on",
    )
    require(config.evaluation.tasks >= 1, "evaluation.tasks", "at least 1")
    require(config.evaluation.every >= 0, "evaluation.every", "0 or more steps")
    require(
        config.evaluation.balanced_candidates >= config.evaluation.balanced_tasks,
        "evaluation.balanced_candidates",
        f"at least config.evaluation.balanced_tasks ({config.evaluation.balanced_tasks}), better five times as many",
    )
    trackers(config)
    require(config.checkpoint.every >= 1, "checkpoint.every", "at least 1")
    require(
        config.checkpoint.keep >= 2, "checkpoint.keep", "at least 2, so that a damaged one has a predecessor"
    )
    require(config.steps >= 1, "steps", "at least 1")


# The least that these may be, as far as the config has them; all are finite.
LEAST = {
    "seed": 0, "mesh.data": 1, "mesh.fsdp": 1, "mesh.expert": 1, "mesh.context": 1, "mesh.tensor": 1,
    "rollout.tasks_per_step": 1, "rollout.max_new_tokens": 1, "rollout.max_steps": 1, "rollout.max_observation": 1,
    "engine.max_concurrency": 1, "data.min_calls": 1, "data.initial_tasks": 1, "evolution.contexts": 1,
    "evolution.tasks": 1, "evolution.rounds": 1, "evolution.steps": 1, "evolution.proposals": 1, "signals.window": 1,
    "signals.rare_percent": 0.0, "evaluation.samples": 1, "evaluation.temperature": 0.0, "evaluation.seed": 0,
    "learner.clip_low": 0.0, "learner.clip_high": 0.0, "learner.weight_decay": 0.0, "learner.kl_coef": 0.0,
    "logging.trajectories_every": 1, "logging.trajectories": 0, "explorer.max_tokens": 1,
    "engine.cache_tokens": 0, "environment.workers": 1, "environment.worker_memory": 0.0, "data.max_turns": 1,
    "data.max_tasks": 0, "learner.decay_steps": 0, "learner.lora_alpha": 0.0, "evaluation.balanced_tasks": 0,
    "health.patience": 1, "strategy.probe": 0, "explorer.temperature": 0.0, "explorer.attempts": 1, "explorer.timeout": 0.0,
    "explorer.patience": 0.0, "explorer.concurrency": 1, "explorer.max_bytes": 1, "explorer.price_in": 0.0,
    "explorer.price_out": 0.0, "explorer.budget_tokens": 0, "explorer.budget_money": 0.0, "explorer.solve": 0,
    "explorer.calibration": 0, "explorer.max_length": 1,
}  # fmt: skip


def to_json(config: ConfigDict) -> str:
    """The config as JSON text with sorted keys."""
    return json.dumps(config.to_dict(), sort_keys=True, indent=1)


def numbers(config: dict) -> dict:
    """What a run's numbers depend on, of a config as plain values: all but SERVING, and LATER where nothing is new."""
    kept = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for key in (*SERVING, *LATER):
        section, name = key.split(".")
        value = kept.get(section, {}).get(name)
        if key in SERVING or (list(value) if isinstance(value, tuple) else value) == LATER[key]:
            kept.get(section, {}).pop(name, None)
    return kept


def digest(config: ConfigDict) -> str:
    """16 hex digits that name everything in the config that a run's numbers depend on."""
    return hashlib.sha256(json.dumps(numbers(config.to_dict()), sort_keys=True).encode()).hexdigest()[:16]


def check_new_file(flag: str, path: str | os.PathLike) -> None:
    """For a file that a command is to write at its end: raises ValueError where one is there, or none can be."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x"):
            pass
        Path(path).unlink()
    except OSError as error:
        why = "exists" if Path(path).exists() else f"cannot be written ({error.strerror})"
        raise ValueError(f"--{flag}={path} {why}: choose another.") from None


def parse_flags(argv: list[str]) -> list[str]:
    """absl's parser, for app.run, with one sentence instead of a traceback for a config key or value that is wrong."""
    for argument in argv[1:]:
        key = argument.lstrip("-").partition("=")[0].removeprefix("config.")
        if argument.startswith("--config.") and key in RENAMED:
            sys.exit(f"Error: the config key {key!r} is called {RENAMED[key]!r} now.")
    try:
        rest = flags.FLAGS(argv)
        if "config" in flags.FLAGS:  # a file that is not there tells when it is looked at
            getattr(flags.FLAGS["config"].value, "model", None)
        return rest
    except flags.Error as error:
        sys.exit(
            f"Error: {str(error).strip().splitlines()[-1].strip().removeprefix('ValueError: ')} (--help lists the options)"
        )
    except (AttributeError, KeyError) as error:
        key = str(error.args[0] if error.args else error).splitlines()[0].strip("'\"")
        sys.exit(
            f"Error: the config has no key {key!r}: the keys and their meaning stand in the config file."
        )
    except (TypeError, ValueError) as error:
        sys.exit(f"Error: {error}")
    except (OSError, SyntaxError, ImportError, NameError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        sys.exit(
            f"Error: --config names no config file that can be read ({why}): give one of configs/, or your own."
        )
