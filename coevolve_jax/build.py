"""Builds the parts that a config names: policy, environment, strategy, explorer, engine, agent and others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import envs, names, shipped
from coevolve_jax.config import keys
from coevolve_jax.distributed import sharding
from coevolve_jax.envs.base import EnvPool, canonical
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Roles
from coevolve_jax.models import hf_io, products
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.records.trackers.base import Tracker
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.chat import Chat, load_tokenizer
from coevolve_jax.rollout.engine import Engine, EngineError
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.seeding import salted
from coevolve_jax.strategies.base import Strategy
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.pipeline import Synthesizer
from coevolve_jax.synthesis.settings import Fits, any_length
from coevolve_jax.types import Task, Trajectory

_GENERATION = "generation_config.json"


@dataclasses.dataclass
class Policy:
    """A Hugging Face model folder, loaded: architecture, parameters, tokenizer and chat format.

    params: None once a run has a TrainState (`loop.trainer.Trainer`).
    folder: as it was named. generation: the settings of its generation_config.json.
    """

    config: ModelConfig
    params: Any
    tokenizer: Any
    chat: Chat
    folder: str = ""
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def save_words(self, folder: str | os.PathLike) -> None:
        """Writes the tokenizer, and the ids that end a message, beside the weights in `folder`.

        They are those of the chat, of config.json and of the base's generation_config.json, whose other
        settings stay.
        """
        own, base = _ids(self.config.eos_token_id), _ids(self.generation.get("eos_token_id"))
        ends = sorted({*self.chat.stop_ids, *own, *base})
        self.tokenizer.save_pretrained(folder)
        hf_io.write_json(Path(folder) / _GENERATION, {**self.generation, "eos_token_id": ends})


def policy(folder: str | os.PathLike, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> Policy:
    """Loads a Hugging Face model folder.

    mesh: the devices to train on, if it is to be trained. dtype: of the parameters.

    Raises ValueError, in one sentence, if it is no such folder or its parts do not match.
    """
    settings = _generation(folder)
    model_config, params = hf_io.load(folder, dtype, mesh)
    tokenizer = load_tokenizer(folder)
    hf_io.check_tokenizer(model_config, tokenizer)
    return Policy(model_config, params, tokenizer, Chat(tokenizer), os.fspath(folder), settings)


def _generation(folder: str | os.PathLike) -> dict[str, Any]:
    """The settings of a folder's generation_config.json, {} where there is none."""
    file = shipped.folder(folder) / _GENERATION
    try:
        settings = json.loads(file.read_text()) if file.is_file() else {}
        if all(isinstance(i, int) for i in _ids(settings.get("eos_token_id"))):
            return settings
    except (AttributeError, ValueError):
        pass
    raise ValueError(
        f"{file} holds no JSON object whose eos_token_id is a token or a list of tokens: restore it from the "
        "checkpoint."
    )


def _ids(told: Any) -> Sequence[Any]:
    """The ids in a setting that holds one, several or None."""
    return told if isinstance(told, tuple | list) else () if told is None else (told,)


def trained_dtype(learner: ConfigDict) -> str:
    """The dtype in which to load a policy that is to be trained. learner: that section of the config.

    It is that of the master weights, which begin as copies of the parameters. With LoRA the adapters are the
    master weights. The parameters are then the frozen base, in the dtype of the computation. A warm start
    writes its policy in this dtype, so that the run which reads it begins as exactly that policy.
    """
    return learner.dtype if learner.lora_rank else learner.param_dtype


def base_notes(config: ConfigDict) -> list[str]:
    """Sentences for the user of LoRA on a base whose weights config.learner.dtype rounds; [] for any other.

    Raises ValueError where config.model is no model folder.
    """
    c = config.learner
    if not c.lora_rank or c.dtype in ("float32", stored := hf_io.dtype_of(config.model)):
        return []
    return [
        f"The weights of config.model ({config.model}) are stored in {stored}, and LoRA's base is read in "
        f"{c.dtype}, config.learner.dtype: the run trains, measures and writes the rounded weights with "
        f"adapters, and policy/adapter/ is for the base in {c.dtype}; --config.learner.dtype=float32 rounds "
        "nothing."
    ]


def family(config: ConfigDict) -> envs.Family:
    """Loads the environment family. Reads environment.name and .python; ValueError for an unknown name."""
    return envs.load(config.environment.name, config.environment.python)


def check_tool_call_format(config: ConfigDict, tasks: Sequence[Task]) -> None:
    """Raises ValueError if the policy is to write code, and no tool that the tasks offer takes code."""
    if config.rollout.tool_call_format != "python":
        return
    worlds = family(config)
    tools = [tool["function"] for task in tasks for tool in worlds.tools(task)]
    if not any("code" in tool.get("parameters", {}).get("properties", ()) for tool in tools):
        raise ValueError(
            f"config.rollout.tool_call_format is 'python': environment {config.environment.name} offers no "
            "execute(code); use json or llama3."
        )


def env_pool(config: ConfigDict) -> ProcessPool:
    """Makes the pool of environment workers. Reads the section environment."""
    c = config.environment
    return ProcessPool(
        c.name,
        workers=c.workers,
        timeout=c.call_timeout,
        memory_gib=c.worker_memory,
        python=c.python,
        backend=c.backend,
    )


@contextlib.contextmanager
def _naming_the_key(config: ConfigDict) -> Iterator[None]:
    """Adds to a ValueError of the environment family the key whose value it quotes."""
    given = {f"environment.{key}": value for key, value in config.environment.items() if key != "name"}
    try:
        yield
    except ValueError as error:
        for key, value in {**given, "data.leak_splits": config.data.leak_splits}.items():
            for each in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
                if each and repr(each) in str(error) and "config." not in str(error):
                    raise ValueError(f"config.{key}: {error}") from None
        raise


def scenarios(config: ConfigDict) -> list[Task]:
    """The training split's scenarios, which exploration for training tasks uses."""
    c = config.environment
    with _naming_the_key(config):
        return family(config).scenarios(c.train_split, c.to_dict())


def held_out_scenarios(config: ConfigDict) -> list[Task]:
    """The evaluation split's scenarios without those whose initial state is also in the training split.

    Raises ValueError if none is left.
    """
    c = config.environment
    with _naming_the_key(config):
        found = family(config).scenarios(c.eval_split, c.to_dict(), apart_from=c.train_split)
    if not found:
        raise ValueError(
            f"config.environment.eval_split is {c.eval_split!r}: every scenario of it begins as one of "
            f"train_split ({c.train_split!r}) does; name another."
        )
    return found


def benchmark_tasks(config: ConfigDict) -> list[Task]:
    """The benchmark's own tasks that synthetic tasks must not copy.

    They are those of the evaluation split and of config.data.leak_splits.
    """
    splits = dict.fromkeys([config.environment.eval_split, *config.data.leak_splits])
    tasks, settings = family(config).tasks, config.environment.to_dict()
    with _naming_the_key(config):
        return [task for split in splits for task in tasks(split, settings)]


def evaluation_scenarios(config: ConfigDict) -> frozenset[str]:
    """The scenarios of the splits of `benchmark_tasks`, as text, without those that training has too."""
    c = config.environment
    splits = dict.fromkeys([c.eval_split, *config.data.leak_splits])
    with _naming_the_key(config):
        found = [family(config).scenarios(split, c.to_dict(), apart_from=c.train_split) for split in splits]
    return frozenset(canonical(task.scenario) for tasks in found for task in tasks)


def training_luck(config: ConfigDict) -> ConfigDict:
    """The config whose seed the draws of training take: config.seed with config.rollout.salt mixed in."""
    seed = salted(config.seed, config.rollout.salt)
    return configs.override(config, {"seed": seed, "rollout.salt": 0})


def strategy(config: ConfigDict, saved: Mapping | None = None) -> Strategy:
    """Builds the strategy. saved: JSON of the checkpoint to resume; another strategy's state is ignored."""
    takes = ("config", "state")
    module = names.module("strategies", config.strategy.name, "strategy.name", ["make"], takes=takes)
    own = saved["strategy"] if saved else {}
    return module.make(config, own["state"] if own.get("name") == config.strategy.name else None)


def check_attention(config: ConfigDict, platform: str) -> None:
    """Raises ValueError where config.learner.attention is the kernel of another platform."""
    name, place = config.learner.attention, {"flash": "gpu", "splash": "tpu"}
    if place.get(name, platform) != platform:
        raise ValueError(
            f"config.learner.attention is {name!r}, a kernel for a {place[name]}, and this computes on a "
            f"{platform}: use auto."
        )


def trackers(config: ConfigDict, workdir: Path) -> list[Tracker]:
    """Builds the trackers, which the Run closes. Raises ValueError if one is unavailable."""
    return [module.make(config, workdir) for module in configs.trackers(config)]


def explorer(
    config: ConfigDict,
    policy: Policy | None = None,
    engine: Engine | None = None,
    recorded: Mapping[str, Any] | None = None,
    agent: Agent | None = None,
) -> Roles:
    """Builds the explorer of config.explorer.name. Parts that the section sets to "scripted" are scripted.

    Args:
      policy, engine: for an explorer that asks the policy (`config.asks_policy`).
      recorded: Roles.served of the run to resume.
      agent: of the policy, for config.explorer.wording.

    Raises:
      ValueError: there is no explorer of that name, or it asks the policy and there is none.
    """
    module = names.module("explorers", config.explorer.name, "explorer.name", ["make"], configs.REMEDY)
    arguments = [config, family(config)]
    rewords = configs.words_by_model(config)
    if configs.asks_policy(config):
        if policy is None or engine is None or (rewords and agent is None):
            key, remedy = ("wording", "set it to rules") if rewords else ("name", "choose another explorer")
            raise ValueError(
                f"config.explorer.{key} is {config.explorer[key]!r}, which asks the policy that a run "
                f"trains, and there is none here: {remedy}."
            )
        arguments += [policy.chat, engine] if getattr(module, "ASKS_POLICY", False) else []
    if getattr(module, "RECORDS_MODEL", False):
        arguments += [recorded]
    roles, rules = module.make(*arguments), scripted.make(*arguments[:2])
    left = [part for part in configs.PARTS if config.explorer.get(part) == "scripted"]
    roles = roles._replace(**{part: getattr(rules, part) for part in left if part != "initial"})
    roles = roles._replace(initial=rules) if "initial" in left else roles
    if set(left) == set(configs.PARTS):
        roles = roles._replace(ask=None)  # no model is asked
    if rewords and policy and engine and agent:
        from coevolve_jax.explorers.wording import worded  # here: it needs the packages of explorer=policy

        return worded(
            roles, config, policy.chat, engine, _one_rollout_each(agent, config.rollout.temperature)
        )
    return roles


def _one_rollout_each(
    agent: Agent, temperature: float
) -> Callable[[Sequence[Task], Sequence[int]], list[Trajectory]]:
    """(tasks, seeds) -> trajectories, one of each task."""
    return lambda tasks, seeds: [
        trajectory
        for group in agent.rollout_groups(tasks, [[seed] for seed in seeds], temperature)
        for trajectory in group.trajectories
    ]


def synthesizer(
    config: ConfigDict, roles: Roles, env_pool: EnvPool, guard: LeakGuard | None, fits: Fits = any_length
) -> Synthesizer:
    """Builds what makes tasks in the config's environment family.

    Args:
      roles: of an explorer.
      guard: as in `Synthesizer`, and so is `fits`.
    """
    worlds = family(config)
    return Synthesizer(roles, worlds.tools, env_pool, config, guard, fits, worlds.action_pattern)


def engine(config: ConfigDict, policy: Policy, workdir: Path | None = None) -> Engine:
    """Builds the engine, which the caller closes.

    Reads the sections rollout and engine, seed, model and learner.replay_routing. An explorer that asks the
    policy adds its own needs.

    Args:
      workdir: launched servers write their logs there, and attached servers read the weights from it.

    Raises:
      ValueError, EngineError: no server can be started or reached.
    """
    replays = config.learner.replay_routing
    constrains = configs.asks_policy(config) and bool(config.explorer.get("json_schema"))
    if config.engine.name == "sglang":
        return _sglang(config, policy, workdir, replays, constrains)
    return NativeEngine(
        policy.config,
        policy.params,
        slots=config.engine.max_concurrency,
        cache_tokens=config.engine.cache_tokens,
        seed=config.seed,
        dtype=jnp.dtype(config.engine.dtype),
        matmul_dtype=_matmul_dtype(config, policy),
        copies=bool(config.rollout.max_staleness),
        record_routing=replays,
        tokenizer=policy.tokenizer if constrains else None,
        mesh=_mesh_of(policy) if config.engine.sharded else None,
        **_sizes(config),
    )


def _matmul_dtype(config: ConfigDict, policy: Policy) -> Any:
    mesh = _mesh_of(policy)
    platform = sharding.platform(mesh) if mesh else jax.default_backend()
    return products.checked(config.engine.matmul_dtype, config.engine.dtype, platform)


def _mesh_of(policy: Policy) -> Mesh | None:
    """The mesh over which the policy's parameters are sharded; None if they are not."""
    where = jax.tree.leaves(policy.params)[0].sharding
    spread = isinstance(where, NamedSharding) and where.num_devices > 1
    return where.mesh if spread and isinstance(where.mesh, Mesh) else None


def _sglang(
    config: ConfigDict, policy: Policy, workdir: Path | None, replays: bool, constrains: bool
) -> Engine:
    # Imported here: the in-process engine needs no HTTP client.
    from coevolve_jax.rollout.sglang.engine import SPARE, SGLangEngine
    from coevolve_jax.rollout.sglang.fleet import Member
    from coevolve_jax.rollout.sglang.push import Pusher
    from coevolve_jax.rollout.sglang.server import Server

    c, sizes, ahead = config.engine, _sizes(config), bool(config.rollout.max_staleness)
    # Servers on other hosts can read the workdir at most, if it is shared.
    shared = workdir / "weights" if workdir and c.url else None
    root = Path(c.push_folder) if c.push_folder else shared
    pusher = Pusher(
        policy.config,
        shipped.folder(config.model),
        dtype=c.dtype,
        transport=c.push,
        root=root,
        exact=c.push_exact,
        timeout=c.push_timeout,
        ahead=ahead,
    )
    members = [Member(url.strip().rstrip("/")) for url in c.url.split(",") if url.strip()]
    with contextlib.ExitStack() as undo:
        launched = []
        for i in range(0 if members else c.servers):
            launched.append(
                Server(
                    config.model,
                    python=c.python or None,
                    dtype=c.dtype,
                    max_running_requests=c.max_concurrency,
                    context_length=sizes["max_length"] + SPARE,
                    version="launched",  # no push has this version
                    words=constrains,
                    arguments=[
                        *shlex.split(c.arguments),
                        *(["--enable-return-routed-experts"] if replays else []),
                        *(["--enable-memory-saver"] if c.sleep else []),
                    ],
                    log_path=workdir and workdir / f"sglang_{i}.log",
                )
            )
            undo.callback(launched[-1].stop)
            if c.servers > 1 and launched[0].device != "cpu":
                raise ValueError(
                    f"config.engine.servers is {c.servers}: on an accelerator it must be 1, since all "
                    f"would take the same devices; start servers with {shipped.command('serve')} and name "
                    "them in config.engine.url."
                )
        try:
            members += [Member(server.wait_until_ready().url, server) for server in launched]
        except RuntimeError as error:  # the server did not start; the error quotes its log
            raise EngineError(str(error)) from None
        made = SGLangEngine(
            policy.config,
            policy.params,
            members=members,
            pusher=pusher,
            timeout=c.timeout,
            attempts=c.attempts,
            patience=c.patience,
            restarts=c.restarts,
            record_routing=replays,
            constrains=constrains,
            ahead=ahead,
            sleeps=c.sleep,
            **sizes,
        )
        undo.pop_all()  # from here on the engine owns the servers
        return made


def _sizes(config: ConfigDict) -> dict[str, int]:
    needs = [(c.max_length, c.max_new_tokens) for c in (config.rollout, config.evaluation)]
    if configs.asks_policy(config):
        needs.append((config.explorer.max_length, config.explorer.max_tokens))
    return {name: max(sizes) for name, sizes in zip(("max_length", "max_new_tokens"), zip(*needs))}


def agent(config: ConfigDict, policy: Policy, engine: Engine, env_pool: ProcessPool) -> Agent:
    """Builds the agent. Reads the sections environment, rollout and engine."""
    worlds, concurrency = family(config), config.engine.max_concurrency
    chat = policy.chat.writing(config.rollout.tool_call_format)
    limits, endings = rollout_limits(config), "endings" in configs.needs(config)
    return Agent(engine, chat, env_pool, worlds.tools, limits, concurrency, worlds.action_pattern, endings)


def evaluation_agent(config: ConfigDict, agent: Agent) -> Agent:
    """The agent within the limits of evaluations. Close `agent`, with which it shares all else."""
    return agent.with_limits(evaluation_limits(config))


def rollout_limits(config: ConfigDict) -> Limits:
    """The limits of training rollouts: the keys of the section rollout with the names of the fields."""
    return Limits(**{field.name: config.rollout[field.name] for field in dataclasses.fields(Limits)})


def evaluation_limits(config: ConfigDict) -> Limits:
    """The limits of evaluations. A key of the section evaluation at its default stands for the rollouts'."""
    own = {field.name: config.evaluation[field.name] for field in dataclasses.fields(Limits)}
    default = {name: keys.REQUIRED[f"evaluation.{name}"].default for name in own}
    changed = {name: value for name, value in own.items() if value != default[name]}
    return dataclasses.replace(rollout_limits(config), **changed)
