"""Every key of a config: its default, its meaning, and what it may be.

A new key is added here and nowhere else. The type of a default is the type of the key; `Key` adds bounds.
Rules that need several keys stand in rules.py. A config file starts from `config.defaults()` and holds what
it changes.

The defaults suit a real model; all that a run can do without is off. Strategies and explorers define their
own settings: DEFAULTS of each module in coevolve_jax/strategies and coevolve_jax/explorers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax.config.kinds import Key, texts, wholes
from coevolve_jax.llm import settings

PRECISIONS = ("float32", "bfloat16")

TOP = dict(
    seed=Key(0, least=0),
    steps=Key(120, least=1),  # GRPO steps
    model="",  # a Hugging Face folder
)

ENVIRONMENT = dict(
    name="bfcl",  # an environment family: coevolve_jax.envs.<name>, or the dotted path of a module
    # Interpreter of the family's own virtual environment; "": this one.
    python=Key("", serving=True),
    train_split="train",  # the scenarios that are explored
    # The scenarios of the held-out tasks. A benchmark's test split is to be read once.
    eval_split="development",
    workers=Key(16, least=1),  # processes
    # "ray": so many processes on every node of the Ray cluster that runs here.
    backend=Key("local", of=("local", "ray"), serving=True),
    # Seconds of processor time. A call that takes more fails its rollout. A reset, and a turn's end with its
    # reference calls, may take 20 times as long, up to a minute.
    call_timeout=Key(5.0, above=0),
    worker_memory=Key(2.0, above=0),  # GiB
)
# Settings of a server that a world starts (envs/mcp/spec.py).
SERVER: dict[str, Any] = dict(
    # A folder whose copies are the worlds; or one with the folders train, development and test of such.
    template="",
    tools=texts(),  # names of the tools that agents may use; none: all
    ignore=texts(),  # patterns of the paths that are no part of a world's state, such as "logs/*"
    # A server serves one world after the other: far quicker, and right for one that remembers nothing itself.
    reuse_server=False,
    network=False,  # whether a server may open sockets
    freeze_time="",  # the time that a server's clocks show, e.g. 2026-01-01T00:00:00; "": they run
    # Seconds that it may take to start, or to answer. Those in which it waits for a processor do not count.
    server_timeout=Key(20.0, above=0),
    server_memory=Key(2.0, above=0),  # GiB of data of each of its processes
    server_disk=Key(256.0, above=0),  # MiB of a world's folder
)
# Settings of one or a few families, absent where a config does not set them.
FAMILIES: dict[str, dict[str, Any]] = {
    "bfcl": dict(toolsets=texts()),  # classes of tools; absent: all
    "tau2": dict(domains=texts()),  # of telecom, retail, airline; absent: all
    "textworld": dict(
        difficulty=wholes(),  # the lowest and the highest level, from 1 to 8
        games=0,  # of each level, for training, and as many for evaluation
    ),
    "appworld": {},
    "tools": dict(source=""),  # "my_env:Shop", "my_env.py:Shop", or a file of functions
    "mcp": dict(
        command="",  # starts the server; {world} stands for the world's folder
        **SERVER,
    ),
    "folder_tools": SERVER,
}
# The families whose tools are a user's own: their settings say which ones these are.
USERS_OWN = ("tools", "mcp", "folder_tools")

DATA = dict(
    initial_tasks=Key(100, least=1),  # N, the size of D_0
    initial_file="",  # a tasks.jsonl whose tasks are D_0, all of them; "": exploration makes D_0
    # The environment's own tasks are D_0 (of train_split) and the held-out ones (of eval_split), instead of
    # explored ones. D_0 leaves out those near an evaluation task. What evolution adds is explored.
    own_tasks=False,
    min_calls=Key(2, least=1),  # of a task
    max_calls=Key(6, least=1),
    max_turns=Key(3, least=1),
    min_evolved_share=Key(0.0, least=0, most=1),  # a batch has at least this share of tasks from evolution
    # Over D_t. "variance": by 4 p (1 - p), where p is the last score of a task.
    sampling=Key("uniform", of=("uniform", "variance")),
    sampling_floor=Key(0.1, least=0, most=1),  # the least weight with "variance"
    # Visits in a row in which all rollouts ended alike, after which a task is drawn no more; 0: never.
    retire_after=Key(0, least=0),
    max_tasks=Key(0, least=0),  # bound on the size of D_t; 0: none
    # A new task is refused from this cosine to an evaluation task on. By features of its calls and words:
    leak_threshold=Key(0.9, above=0, most=1),
    # By the calls with their arguments alone, in any words and order; 0: not compared. This sees most
    # paraphrases, which the features miss (docs/notes/leak_control.md). Also from this share of an evaluation
    # task's calls on, where it has two different ones with arguments.
    leak_call_threshold=Key(0.88, least=0, most=1),
    # By n-grams of 3 to 5 characters of the queries alone; 0: not compared. 0.9 is a good value
    # (docs/notes/leak_control.md).
    leak_query_threshold=Key(0.0, least=0, most=1),
    # By the vectors of a model: the dotted path of a function embed(texts) -> floats [n, d]; "": none.
    leak_embedding="",
    leak_embedding_threshold=Key(0.0, least=0, most=1),
    leak_splits=texts(),  # new tasks are compared with the tasks of these splits, besides eval_split's
)

ROLLOUT = dict(
    tasks_per_step=Key(32, least=1),
    group_size=Key(8, least=2, why="a group needs a spread"),  # K rollouts per task
    temperature=Key(1.0, above=0, why="greedy rollouts have no spread"),  # top_p is always 1
    max_length=Key(8192, least=1),  # tokens of a trajectory
    max_new_tokens=Key(512, least=1),  # of one assistant message
    max_steps=Key(20, least=1),  # messages with calls per user turn (BFCL's own limit)
    max_messages=Key(0, least=0),  # assistant messages of the whole conversation; 0: no bound
    # A tool call that cannot be read is answered with an error, or ends the turn.
    malformed=Key("answer", of=("answer", "end_turn")),
    max_observation=Key(4000, least=1),  # characters of a tool result that the policy reads
    # How the policy writes calls. "json": as Qwen; "llama3": one JSON object a message; "python": the first
    # such block of a message is run, for execute(code).
    tool_call_format=Key("json", of=("json", "llama3", "python")),
    # Other luck in training, for all draws of rollouts, batches and evolutions. The start and the evaluations
    # stay; 0: the luck of config.seed.
    salt=Key(0, least=0),
    # S: the rollouts of the next S steps already run, with weights that are up to S updates old.
    max_staleness=Key(0, least=0),
)

ENGINE = dict(
    name=Key("native", of=("native", "sglang")),  # "native": in this process; "sglang": servers
    max_concurrency=Key(64, least=1),  # conversations at once
    dtype=Key("bfloat16", of=PRECISIONS),  # of the computation and the cache
    # "native" on a CPU only: dtype of the operands of its products, with results in dtype="float32".
    matmul_dtype=Key("", of=("", "bfloat16")),
    # "native" only: on all devices of config.mesh, with the weights where the learner has them.
    sharded=False,
    # "native" only: tokens of all conversations together, in pages; 0: a row each, as long as the longest.
    cache_tokens=Key(0, least=0, serving=True),
    # All that follows concerns "sglang". Servers to attach to, separated by commas; "": they are launched.
    url=Key("", serving=True),
    servers=Key(1, least=1, serving=True),  # to launch
    # Interpreter of the environment that has sglang; "": .sglang/bin/python, or this one.
    python=Key("", serving=True),
    arguments="",  # more arguments of launched servers, as on the command line
    # How weights get there. "distributed": by torch.distributed (NCCL on GPUs).
    push=Key("disk", of=("disk", "distributed"), serving=True),
    # For "disk", a folder that the servers see; "": WORKDIR/weights, or a temporary one if they are launched.
    push_folder=Key("", serving=True),
    push_timeout=Key(600.0, above=0, serving=True),  # seconds that a server may take to load new weights
    # Weights are verified tensor by tensor. False: for servers that keep them in a layout of their own.
    push_exact=Key(True, serving=True),
    # Servers on the learner's own GPUs give back their memory while it updates.
    sleep=Key(False, serving=True),
    timeout=Key(120.0, above=0, serving=True),  # seconds that one message may take
    attempts=Key(5, least=1, serving=True),  # at a message, before its trajectory is given up as invalid
    patience=Key(120.0, above=0, serving=True),  # seconds to wait while no server answers
    restarts=Key(5, least=0, serving=True),  # of each launched server
)

LEARNER = dict(
    learning_rate=Key(1e-6, above=0),
    warmup_steps=Key(0, least=0),  # updates in which the rate rises, the first at 1 / warmup_steps of it
    schedule=Key("constant", of=("constant", "cosine", "linear")),  # of the rate after the warm-up
    decay_steps=Key(0, least=0),  # the update at which cosine and linear have come down
    final_rate=Key(0.0, least=0),  # to this share of learning_rate
    adam_b1=Key(0.9, least=0),
    adam_b2=Key(0.999, least=0),
    weight_decay=Key(0.0, least=0),  # of matrices; norms and biases never decay
    decay_embeddings=False,
    max_grad_norm=Key(1.0, above=0),
    # The table in coevolve_jax/grpo/losses.py tells which of these is which paper's method.
    advantage=Key("group_std", of=("group_std", "group_mean", "leave_one_out")),
    ratio=Key("token", of=("token", "sequence")),  # whose ratio is clipped
    aggregate=Key("token", of=("token", "sequence", "constant")),  # the mean over tokens; or over sequences
    # "clipped" (PPO's), "cispo", or the dotted path of a function (coevolve_jax/grpo/surrogates.py).
    surrogate="clipped",
    constant_length=Key(512, least=1),  # tokens, for "constant": the sum over a trajectory is divided by them
    # Neither acts with tis_cap, one epoch and no max_staleness: every ratio is 1 then.
    clip_low=Key(0.2, least=0, most=1, why="ratios are above 0"),
    clip_high=Key(0.2, least=0),
    kl=Key("k3", of=("k1", "k2", "k3", "none")),  # estimator
    kl_coef=Key(0.001, least=0),  # weight of the KL to the frozen start
    kl_bound=Key(10.0, least=0),  # nats from which the KL of a token is a straight line; 0: never
    # Weight of the load-balancing loss, for models with experts. It is taken of each micro-batch, so that
    # rows_per_microbatch changes it.
    router_balance=Key(0.0, least=0),
    replay_routing=False,  # use the experts that the sampler used, for models with experts
    # Bound on the weight learner / sampler of a token; 0: a ratio to the sampler. 2 where both compute in
    # bfloat16.
    tis_cap=Key(0.0, least=0),
    epochs=Key(1, least=1),  # updates per batch of rollouts
    # Groups without spread have no advantage. Leaving them out saves their work.
    skip_zero_variance_groups=True,
    # Rounds, at most, in which groups without spread are replaced by others.
    dynamic_sampling=Key(0, least=0),
    group_filter=False,  # leave out groups of unusual spread (coevolve_jax/grpo/filter.py)
    filter_side=Key("low", of=("low", "high")),  # leave out spreads below the usual, or above
    filter_z=Key(1.28, least=0),  # standard deviations from the mean spread to the limit
    filter_keep=Key(0.5, least=0, most=1),  # at least this share of the groups with spread stays
    filter_decay=Key(0.1, above=0, most=1),  # weight of a new group in the running mean and variance
    filter_warmup=Key(20, least=1),  # groups with spread before the first is left out
    # Leave rollouts that a limit ended out of the loss. Their rewards count in the means of their groups: the
    # term `overlong` of config.reward does nothing else to them then.
    overlong_filtering=False,
    pack_length=Key(8192, least=1),  # tokens of a packed row
    # Shorter rows, e.g. (8192, 16384), for batches that compute fewer tokens in them.
    pack_length_buckets=wholes(),
    rows_per_microbatch=Key(1, least=1),
    prefix_sharing=False,  # one copy of the prompt for the rollouts of a group that lie in one row
    logprob_chunk=Key(4096, least=1),  # tokens whose logits exist at once, at most; a CPU takes fewer
    # By platform; or one of them: flash is for NVIDIA GPUs, splash for TPUs.
    attention=Key("auto", of=("auto", "plain", "chunked", "flash", "splash")),
    remat=True,  # recompute layers in the backward pass
    dtype=Key("bfloat16", of=PRECISIONS),  # of the computation
    # On a CPU only: "bfloat16" operands of products, with results in dtype="float32". Faster on AVX512-BF16.
    matmul_dtype=Key("", of=("", "bfloat16")),
    param_dtype=Key("float32", of=PRECISIONS),  # of the master weights
    moment_dtype=Key("float32", of=PRECISIONS),  # of Adam's moments
    # Adam's moments lie in pinned memory of the host; each layer's are on the device for its step alone.
    optimizer_offload=Key(False, serving=True),
    lora_rank=Key(0, least=0),  # 0: all parameters are trained
    lora_alpha=Key(16.0, above=0),  # adapters are scaled by lora_alpha / lora_rank
    lora_targets="layers/.*_proj/kernel",  # regular expression on parameter paths
)

# What a rollout is worth to the learner besides its outcome (coevolve_jax/diagnosis/rewards.py).
REWARD = dict(
    # Each "WHAT:WEIGHT", e.g. ("length:0.1", "errors:-0.2"): a name of the table there, or a formula such as
    # "double(errors) / double(calls):-0.1". Outcomes never change.
    terms=texts(),
)

MESH = dict(  # the product is the number of devices
    data=Key(1, least=1),
    fsdp=Key(1, least=1),
    expert=Key(1, least=1),
    # Splits the tokens of rows, where one device does not hold a row. 2 * context divides pack_length.
    context=Key(1, least=1),
    tensor=Key(1, least=1),
)

# Supervised learning on the solutions of tasks, before RL (loop/warm_start.py).
WARM_START = dict(
    steps=Key(0, least=0),  # updates; 0: none, RL starts from config.model
    # A tasks.jsonl, or the workdir of a run whose tasks it takes; "": unguided exploration, whatever D_0 is.
    source="",
    tasks=Key(256, least=1),  # to explore
    batch=Key(16, least=1),  # demonstrations per update
    learning_rate=Key(1e-5, above=0),  # after a warm-up of at most 10 updates; falls linearly to a tenth
    held_out=Key(0.1, least=0, most=0.9),  # share of the demonstrations that it never learns from
    eval_every=Key(10, least=1),  # updates between measurements of the held-out loss
    patience=Key(0, least=0),  # measurements in a row without a new best one, after which it stops; 0: never
    eval_tasks=Key(0, least=0),  # held-out tasks, at most, that are rolled out by the in-process engine
    success_every=Key(0, least=0),  # updates between these evaluations; 0: before and after only
    checkpoint_every=Key(50, least=1),  # updates
)

SIGNALS = dict(
    window=Key(10, least=1),  # W, the scores that forgetting looks back on
    rare_percent=Key(5.0, above=0, most=100),  # theta
)

EVOLUTION = dict(
    every=Key(10, least=1),  # F, GRPO steps between evolutions
    # Steps that an evolution takes beside training before D_t grows; 0: training waits for it.
    async_steps=0,
    # D_t stays as it is in the last so many steps. More than rollout.max_staleness.
    freeze_last_steps=Key(10, least=1, why="what is born must be trained on"),
    tasks=Key(24, least=1),  # validated tasks wanted per evolution
    contexts=Key(24, least=1),  # trajectories reflected on at most, per evolution
    rounds=Key(3, least=1),  # R
    steps=Key(10, least=1),  # S, environment steps per round
    proposals=Key(3, least=1),  # tasks abstracted per context at most
    validate=True,  # by execution; False is an ablation
    # Of each proposal, in fresh environments. From 2 on those that differ are refused.
    executions=Key(1, least=1, why="config.evolution.validate=False is the ablation without execution"),
)

# What training may cost, besides config.steps: whichever comes first ends it.
BUDGET = dict(
    # Training rollouts of every role (policy, probe, branch, wording): it ends after the step in which the
    # ledger reaches so many; 0: no bound. Evolutions keep the steps that config.steps gives them.
    rollouts=Key(0, least=0),
)

EVALUATION = dict(
    tasks=Key(192, least=1),  # held-out synthetic tasks, made as D_0 is
    balanced_tasks=Key(0, least=0),  # and these besides, in which all tools come about equally often
    balanced_candidates=0,  # tasks that they are chosen from
    queries=Key(0, least=0),  # and these, which a strategy may learn from without their answers
    every=Key(20, least=0),  # GRPO steps between evaluations on the way; 0: before and after only
    num_rollouts=Key(2, least=1),  # rollouts per task
    last_rollouts=Key(0, least=0),  # and in the last evaluation, after training; 0: as many as in the others
    temperature=Key(1.0, least=0.0),
    seed=Key(1234, least=0),  # of the held-out tasks; the same for every run
    # Limits of its rollouts, which also bound the held-out tasks. By default each is that of config.rollout.
    max_length=Key(0, least=0),  # 0: as in rollout
    max_new_tokens=Key(0, least=0),  # 0: as in rollout
    max_steps=Key(0, least=0),  # 0: as in rollout
    max_messages=Key(-1, least=-1),  # 0: no bound; -1: as in rollout
    max_observation=Key(0, least=0),  # 0: as in rollout
    malformed=Key("", of=("", "answer", "end_turn")),  # "": as in rollout
)

# Thresholds beyond which a step raises an alert. coevolve_jax/records/health.py says what each means.
HEALTH = dict(
    patience=Key(3, least=1),  # steps in a row before it is told in the terminal
    zero_variance_groups=0.7,  # the paper's 0.5 and 0.3 are for rewards with more levels
    group_std=0.05,
    logprob=-0.02,  # -0.05 for language; most tokens here are copies
    few_steps=1.0,
    many_steps=50.0,
    truncated=0.2,
    active_groups=0.2,
    length_reward=0.3,
    malformed=0.3,
    invalid=0.05,
)

CHECKPOINT = dict(
    every=Key(5, least=1),  # GRPO steps
    keep=Key(2, least=2, why="a damaged one needs a predecessor"),
    # Where they lie, e.g. gs://BUCKET/RUN; "": checkpoints/ of the workdir.
    folder=Key("", serving=True),
)

LOGGING = dict(
    trajectories_every=Key(10, least=1),  # steps between trajectory files
    trajectories=Key(8, least=0),  # trajectories per file
    # Steps between files of whole groups, with all tokens; 0: none (coevolve_jax/records/rollouts.py).
    rollouts_every=Key(0, least=0),
    evaluations=False,  # files of the held-out rollouts, without tokens
    trackers=Key("tensorboard", serving=True),  # tensorboard,wandb,trackio or dotted paths of modules
)

# How the training set evolves: "coevolve", "blame" (a signal of ours), "random" (as many new tasks, without
# signals), "static" (no new tasks, plain GRPO), "oracle" (testbeds only), or the dotted path of a module
# (docs/guides/add_strategy.md).
STRATEGY = dict(name="coevolve")
# Who explores: "scripted", "llm" (a model over the OpenAI protocol), "policy" (the one that is trained), or
# the dotted path of a module (docs/guides/add_explorer.md).
EXPLORER = dict(name="scripted")

SECTIONS: dict[str, dict[str, Any]] = {
    "environment": ENVIRONMENT, "data": DATA, "rollout": ROLLOUT, "engine": ENGINE, "learner": LEARNER,
    "reward": REWARD, "mesh": MESH, "warm_start": WARM_START, "strategy": STRATEGY, "signals": SIGNALS,
    "explorer": EXPLORER, "evolution": EVOLUTION, "budget": BUDGET, "evaluation": EVALUATION,
    "health": HEALTH, "checkpoint": CHECKPOINT, "logging": LOGGING,
}  # fmt: skip

# A section of comparisons whose weak tools are known, absent elsewhere.
TESTBED = dict(
    weak_tools=texts(),
    least=Key(1, least=0),  # tasks of D_0 with each of them
    most=Key(1, least=0),
    candidates=Key(800, least=1),  # tasks that D_0 is chosen from
)

# A section of campaigns, in which the harness evolves too (coevolve_jax/harness), absent elsewhere.
HARNESS = dict(
    versions=Key(6, least=1),  # to train, besides the start
    seeds=wholes(0, 1),  # of the runs of each version
    seed=Key(0, least=0),  # of what the proposer draws
    # Who proposes: scripted, llm, placebo, score, search, or the dotted path of a module.
    proposer="scripted",
    levers=texts(),  # the open ones (harness/levers.py); none: all
    bounds=texts(),  # KEY=LOW:HIGH of a lever, in place of its own
    diagnostics=Key("evolving", of=("evolving", "fixed")),  # whether new diagnostics may be registered
    test_split="test",  # the split of environment that is sealed until --final, which reads it
    audit=Key("replay", of=("replay", "none")),  # who judges successes besides the environment
    # Standard deviation of a run's success on the selection set about the mean of its seed, a rate. This is
    # that of configs/bfcl_harness.py (docs/results/harness.md).
    noise=Key(0.025, least=0.0, most=0.5, why="it is a rate, so 0.025 is 2.5 points"),
)

# A section of campaigns whose proposer asks a model: the settings of its client (llm/settings.py).
HARNESS_MODEL: dict[str, Any] = {**settings.DEFAULTS, "budget_tokens": 400_000}

# Bounds on settings of our strategies and explorers. Their modules have the defaults and the meanings.
OWN: dict[str, Key] = {
    "strategy.probe": Key(None, least=0),
    "explorer.base_url": Key(None, serving=True),
    "explorer.key_variable": Key(None, serving=True),
    "explorer.timeout": Key(None, least=0.0, serving=True),
    "explorer.attempts": Key(None, least=1, serving=True),
    "explorer.patience": Key(None, least=0.0, serving=True),
    "explorer.concurrency": Key(None, least=1, serving=True),
    "explorer.cache": Key(None, serving=True),
    "explorer.offline": Key(None, serving=True),
    "explorer.temperature": Key(None, least=0.0),
    "explorer.max_tokens": Key(None, least=1),
    "explorer.max_length": Key(None, least=1),
    "explorer.max_bytes": Key(None, least=1),
    "explorer.price_in": Key(None, least=0.0),
    "explorer.price_out": Key(None, least=0.0),
    "explorer.budget_tokens": Key(None, least=0),
    "explorer.budget_money": Key(None, least=0.0),
    "explorer.solve": Key(None, least=0),
    "explorer.calibration": Key(None, least=0),
    "explorer.wording": Key(None, of=("rules", "varied", "policy")),
    "explorer.wording_attempts": Key(None, least=0),
}

# Old name -> new name. An old name is refused with a sentence that has the new one.
RENAMED: dict[str, str] = {
    "data.new_share": "data.min_evolved_share",
    "evolution.settle_steps": "evolution.freeze_last_steps",
    "evolution.overlap": "evolution.async_steps",
    "learner.moments_on": "learner.optimizer_offload",
    "learner.share_prompts": "learner.prefix_sharing",
    "learner.row_length": "learner.pack_length",
    "learner.row_buckets": "learner.pack_length_buckets",
    "learner.skip_dead_groups": "learner.skip_zero_variance_groups",
    "health.dead_groups": "health.zero_variance_groups",
    "health.kept_groups": "health.active_groups",
    "evaluation.samples": "evaluation.num_rollouts",
    "rollout.calls": "rollout.tool_call_format",
}


def _specified(found: Mapping[str, Any], prefix: str = "") -> dict[str, Key]:
    return {f"{prefix}{k}": v if isinstance(v, Key) else Key(v) for k, v in found.items()}


# By dotted name: the keys that every config has, and those that a config may have.
REQUIRED: dict[str, Key] = _specified(TOP)
for _section, _keys in SECTIONS.items():
    REQUIRED |= _specified(_keys, f"{_section}.")
OPTIONAL: dict[str, Key] = _specified(TESTBED, "testbed.") | _specified(HARNESS, "harness.")
OPTIONAL |= _specified(HARNESS_MODEL, "harness_model.")
for _keys in FAMILIES.values():
    OPTIONAL |= _specified(_keys, "environment.")
SERVING = tuple(name for name, key in (REQUIRED | OWN).items() if key.serving)


def names(config: Mapping[str, Any] | ConfigDict) -> list[str]:
    """The dotted names of a config's keys. config: a ConfigDict or its plain values."""
    sections = {name: part for name, part in config.items() if hasattr(part, "items")}
    inner = [f"{section}.{name}" for section, part in sections.items() for name in part]
    return [name for name in config if name not in sections] + inner


def unknown(name: str, there: Iterable[str] = ()) -> str:
    """Returns the sentence that refuses a dotted name that no key has.

    there: names of a config at hand, which may have keys that are not specified here.
    """
    if name in RENAMED:
        return f"config.{name} is called config.{RENAMED[name]} now: use that name."
    if name in OWN:
        section = name.partition(".")[0]
        return (
            f"config.{name} is no setting of this config's {section}: leave it out, or name the {section} "
            f"that has it in the config file's argument (--config=FILE:{section}=NAME)."
        )
    if name in OPTIONAL:
        section, _, key = name.partition(".")
        if section == "environment":
            having = " and ".join(family for family, settings in FAMILIES.items() if key in settings)
            return (
                f"config.{name} is a setting of the environment {having}, not of this config's: leave it out."
            )
        return (
            f"config.{name} needs a section config.{section}, which this config lacks: name a config file "
            "that has one."
        )
    near = difflib.get_close_matches(name, [*REQUIRED, *OPTIONAL, *OWN, *there], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"The config has no key {name!r}{hint}: coevolve_jax/config/keys.py has the keys and their meaning."
    )


def foreign(section: str, name: str, key: str, settings: Iterable[str]) -> str:
    """Returns the sentence that refuses a setting which a strategy or explorer of ours does not have."""
    near = difflib.get_close_matches(key, settings, n=1, cutoff=0.8)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"config.{section}.{key} is no setting of the {section} {name}{hint}: leave it out, or name the "
        f"{section} that has it in the config file's argument (--config=FILE:{section}=NAME)."
    )


def check_names(config: Mapping[str, Any] | ConfigDict) -> None:
    """Raises ValueError for a name that no key has, with the new name where it was renamed.

    Strategies, explorers and environment families of others name their own settings, which pass.
    """
    own = ["strategy.", "explorer."]
    environment: Any = config.get("environment")
    if hasattr(environment, "get") and environment.get("name") not in tuple(FAMILIES):
        own.append("environment.")
    for name in names(config):
        if name in RENAMED or not (name in REQUIRED or name in OPTIONAL or name.startswith(tuple(own))):
            raise ValueError(unknown(name))
