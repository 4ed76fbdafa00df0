"""Knows the kind of value that each key of a config holds, so that a mistyped one is told before anything is computed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

WHOLE, NUMBER, TRUTH, TEXT, TEXTS, LIST = (
    "a whole number below 2**63", "a finite number", "True or False", "a text", "a tuple of texts", "a tuple",
)  # fmt: skip

KINDS = {
    WHOLE: """seed steps environment.workers environment.games data.initial_tasks data.min_calls data.max_calls
        data.max_turns data.retire_after data.max_tasks rollout.tasks_per_step rollout.group_size rollout.max_length
        rollout.max_new_tokens rollout.max_steps rollout.max_messages rollout.max_observation rollout.max_staleness
        engine.max_concurrency engine.cache_tokens engine.servers engine.attempts engine.restarts learner.warmup_steps
        learner.decay_steps learner.constant_length learner.epochs learner.dynamic_sampling learner.row_length
        learner.rows_per_microbatch learner.logprob_chunk learner.lora_rank mesh.data mesh.fsdp mesh.expert mesh.context
        mesh.tensor signals.window evolution.every evolution.overlap evolution.settle_steps evolution.tasks
        evolution.contexts evolution.rounds evolution.steps evolution.proposals evolution.executions evaluation.tasks
        evaluation.balanced_tasks evaluation.balanced_candidates evaluation.every evaluation.samples evaluation.seed
        health.patience checkpoint.every checkpoint.keep logging.trajectories_every logging.trajectories testbed.least
        testbed.most testbed.candidates""",
    NUMBER: """environment.call_timeout environment.worker_memory data.new_share data.sampling_floor data.leak_threshold
        data.leak_call_threshold data.leak_query_threshold data.leak_embedding_threshold rollout.temperature
        engine.push_timeout engine.timeout engine.patience learner.learning_rate learner.final_rate learner.adam_b1
        learner.adam_b2 learner.weight_decay learner.max_grad_norm learner.clip_low learner.clip_high learner.kl_coef
        learner.kl_bound learner.router_balance learner.tis_cap learner.lora_alpha signals.rare_percent
        evaluation.temperature health.dead_groups health.group_std health.logprob health.few_steps health.many_steps
        health.truncated health.kept_groups health.length_reward health.malformed health.invalid""",
    TRUTH: """engine.sharded engine.push_exact engine.sleep learner.decay_embeddings learner.replay_routing
        learner.skip_dead_groups learner.group_filter learner.share_prompts learner.remat evolution.validate""",
    TEXT: """model environment.name environment.python environment.train_split environment.eval_split environment.backend
        data.initial_file data.sampling data.leak_embedding rollout.malformed rollout.calls engine.name engine.dtype
        engine.url engine.python engine.arguments engine.push engine.push_folder learner.schedule learner.advantage
        learner.ratio learner.aggregate learner.kl learner.attention learner.dtype learner.param_dtype
        learner.moment_dtype learner.moments_on learner.lora_targets strategy.name explorer.name checkpoint.folder
        logging.trackers""",
    TEXTS: "environment.toolsets environment.domains data.leak_splits testbed.weak_tools",
    LIST: "environment.difficulty learner.row_buckets",
}  # fmt: skip
KIND = {key: kind for kind, keys in KINDS.items() for key in keys.split()}
_OF_DEFAULT = {bool: TRUTH, int: WHOLE, float: NUMBER, str: TEXT}  # of a setting of a strategy or an explorer


def check(config: ConfigDict) -> None:
    """Raises ValueError, in one sentence, for a value of another kind than its key's. Keys that are not there are passed over."""
    for key, kind in KIND.items():
        section, _, name = key.rpartition(".")
        holder = config.get(section) if section else config
        if isinstance(holder, Mapping | ConfigDict):
            if name in holder:
                _check(key, holder[name], kind)
        elif holder is not None or section in config:
            raise ValueError(f"config.{section} is {holder!r}: it must be a section, with the key {name}.")


def check_section(config: ConfigDict, section: str, defaults: ConfigDict) -> None:
    """Raises ValueError for a setting of another kind than its default."""
    for name, default in defaults.items():
        if (kind := _OF_DEFAULT.get(type(default))) and name in config[section]:
            _check(f"{section}.{name}", config[section][name], kind)


def _check(key: str, value: Any, kind: str) -> None:
    if not _is(value, kind):
        shown = "a section" if isinstance(value, ConfigDict) else repr(value)
        raise ValueError(f"config.{key} is {shown}: it must be {kind}.")


def _is(value: Any, kind: str) -> bool:
    truth = isinstance(value, bool)
    if kind == TRUTH:
        return truth
    if kind == WHOLE:
        return isinstance(value, numbers.Integral) and not truth and abs(int(value)) < 2**63
    if kind == NUMBER:
        return isinstance(value, numbers.Real) and not truth and math.isfinite(value)
    if kind == TEXT:
        return isinstance(value, str) and "\0" not in value
    listed = isinstance(value, tuple | list)
    return listed and (kind == LIST or all(_is(part, TEXT) for part in value))
