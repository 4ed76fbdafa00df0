"""CoEvolve on BFCL's real multi-turn environment with the tiny Qwen3 in this repository.

Paper: "CoEvolve: Training LLM Agents via Agent-Data Mutual Evolution" (arXiv 2604.15840); the
values here are those that fit two CPU cores, configs/bfcl_qwen3_4b.py has the paper's.
Hardware: two CPU cores, 4 GB of memory. Expected time and score: see docs/notes/results.md.

    python experiments/main.py --config=configs/bfcl_tiny.py --workdir=runs/demo

Arguments: strategy (coevolve, or blame, random, static, a module of yours), seed, engine (native, or sglang: a server
generates) and explorer (scripted, or llm, policy, a module of yours), as in

    python experiments/main.py --config=configs/bfcl_tiny.py:strategy=random,seed=1 --workdir=runs/random
"""

from ml_collections import ConfigDict

from coevolve_jax.config import explorer, parse_arg, strategy


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(arg, strategy="coevolve", seed=0, engine="native", explorer="scripted")
    c = ConfigDict()
    c.seed = arg.seed
    c.steps = 60  # GRPO steps
    c.model = "models/tiny_qwen3"  # a Hugging Face folder

    c.environment = ConfigDict()
    c.environment.name = "bfcl"  # an environment family: coevolve_jax.envs.<name>, or a module's dotted path
    c.environment.python = ""  # interpreter of the family's own virtual environment; "": this one
    c.environment.toolsets = ("GorillaFileSystem", "MessageAPI", "TicketAPI", "TwitterAPI")
    c.environment.train_split = "train"  # whose scenarios are explored
    c.environment.eval_split = (
        "development"  # whose scenarios the held-out tasks live in; "test": to be read once
    )
    c.environment.workers = 2  # processes
    c.environment.backend = (
        "local"  # "ray": so many processes on every node of the Ray cluster that runs here
    )
    c.environment.call_timeout = 2.0  # seconds of processor time; a call that takes more fails its rollout
    c.environment.worker_memory = 2.0  # GiB

    c.data = ConfigDict()
    c.data.initial_tasks = 100  # N, size of D_0
    c.data.initial_file = ""  # a tasks.jsonl whose tasks are D_0, all of them; "": it comes from exploration
    c.data.min_calls = 2
    c.data.max_calls = 6
    c.data.max_turns = 3
    c.data.new_share = 0.5  # at least this share of a batch from the tasks that evolution made
    c.data.sampling = "uniform"  # over D_t; or "variance": by 4 p (1 - p), p being a task's last score
    c.data.sampling_floor = 0.1  # the least weight with "variance"
    c.data.retire_after = (
        0  # visits in a row with all rollouts alike, after which a task is drawn no more; 0: never
    )
    c.data.max_tasks = 0  # bound on the size of D_t; 0 is none
    c.data.leak_threshold = 0.9  # cosine to an evaluation task from which a new task is refused
    # The same of the calls with their arguments alone, in any words and order; 0: not compared. It sees most paraphrases,
    # which the features do not (docs/notes/performance.md).
    c.data.leak_call_threshold = 0.88
    # The same of the wording of the queries alone; 0: not compared (docs/notes/performance.md has how to choose them).
    c.data.leak_query_threshold = 0.0  # cosine of their n-grams of 3 to 5 characters; 0.9 if they are
    c.data.leak_embedding = ""  # dotted path of a function embed(texts) -> floats [n, d]; "": none
    c.data.leak_embedding_threshold = 0.0  # cosine of its vectors
    c.data.leak_splits = (
        "test",
    )  # new tasks are compared with these splits' tasks too, besides eval_split's

    c.rollout = ConfigDict()
    c.rollout.tasks_per_step = 16
    c.rollout.group_size = 8  # K rollouts per task
    c.rollout.temperature = 1.0  # top_p is always 1
    c.rollout.max_length = 512  # tokens of a trajectory
    c.rollout.max_new_tokens = 64  # tokens of one assistant message
    c.rollout.max_steps = 20  # messages with calls per user turn (BFCL's own limit)
    c.rollout.max_messages = 0  # assistant messages of the whole conversation; 0: no bound
    c.rollout.malformed = "answer"  # a tool call that cannot be read, with an error; or "end_turn"
    c.rollout.max_observation = 160  # characters of a tool result that the policy reads
    c.rollout.calls = "json"  # how the policy writes calls; "python": the first such block of a message is run, for execute(code)
    c.rollout.max_staleness = 0  # S: the next S steps' rollouts already run, with weights up to S updates old

    c.engine = ConfigDict()
    c.engine.name = arg.engine  # "native", in this process, or "sglang"
    c.engine.max_concurrency = 64  # conversations at once
    c.engine.dtype = "float32"  # of its computation and its cache, or "bfloat16"
    c.engine.sharded = (
        False  # "native" only: on all devices of config.mesh, with the weights where the learner has them
    )
    c.engine.cache_tokens = 0  # "native" only: tokens of all conversations together, in pages; 0: a row each, as long as the longest
    # The rest concerns engine.name = "sglang".
    c.engine.url = ""  # servers to attach to, separated by commas; "": they are launched
    c.engine.servers = 1  # to launch
    c.engine.python = ""  # interpreter of the environment that has sglang; "": .sglang/bin/python or this one
    c.engine.arguments = ""  # more arguments of launched servers, as on the command line
    c.engine.push = "disk"  # how weights get there; "distributed": by torch.distributed (NCCL on GPUs)
    c.engine.push_folder = (
        ""  # for "disk": one that the servers see; "": WORKDIR/weights, or temporary if launched
    )
    c.engine.push_timeout = 600.0  # seconds that a server may take to load new weights
    c.engine.push_exact = (
        True  # verify tensor by tensor; False for servers that keep weights in a layout of their own
    )
    c.engine.sleep = False  # servers on the learner's own GPUs give back their memory while it updates
    c.engine.timeout = 120.0  # seconds that one message may take
    c.engine.attempts = 5  # at a message, before its trajectory is given up as invalid
    c.engine.patience = 120.0  # seconds to wait while no server answers
    c.engine.restarts = 5  # of each launched server

    c.learner = ConfigDict()
    c.learner.learning_rate = (
        1e-4  # at 3e-4 this policy is certain of every token by step 30 and learns no more
    )
    c.learner.warmup_steps = 0  # updates in which the rate rises, the first at 1 / warmup_steps of it
    c.learner.schedule = "constant"  # of the rate after the warm-up; or "cosine", "linear"
    c.learner.decay_steps = 0  # update at which cosine and linear have come down
    c.learner.final_rate = 0.0  # to this share of learning_rate
    c.learner.adam_b1 = 0.9
    c.learner.adam_b2 = 0.95
    c.learner.weight_decay = 0.0  # of matrices; norms and biases never decay
    c.learner.decay_embeddings = False
    c.learner.max_grad_norm = 1.0
    # Which of these is which paper's method: see the table in coevolve_jax/grpo/losses.py.
    c.learner.advantage = "group_std"  # or "group_mean", "leave_one_out"
    c.learner.ratio = "token"  # whose ratio is clipped; or "sequence"
    c.learner.aggregate = "token"  # mean over tokens; or "sequence", "constant"
    c.learner.constant_length = 512  # tokens, for "constant": what the sum over a trajectory is divided by
    # Neither acts with tis_cap, one epoch and no max_staleness: every ratio is 1 then.
    c.learner.clip_low = 0.2
    c.learner.clip_high = 0.2
    c.learner.kl = "k3"  # estimator; or "k1", "k2", "none"
    c.learner.kl_coef = 0.01  # weight of the KL to the frozen start
    c.learner.kl_bound = 10.0  # nats from which a token's KL is a straight line; 0: never
    c.learner.router_balance = 0.0  # weight of the load-balancing loss, for models with experts
    c.learner.replay_routing = False  # use the experts that the sampler used, for models with experts
    c.learner.tis_cap = 0.0  # bound on the weight learner / sampler of a token; 0: a ratio to the sampler
    c.learner.epochs = 1  # updates per batch of rollouts
    c.learner.skip_dead_groups = (
        True  # groups without spread have no advantage; leaving them out halves the work
    )
    c.learner.dynamic_sampling = 0  # rounds, at most, in which groups without spread are replaced by others
    c.learner.group_filter = False  # leave out groups of unusually small spread
    c.learner.row_length = 512  # tokens of a packed row
    c.learner.row_buckets = ()  # shorter rows, for batches that compute fewer tokens in them, e.g. (8192, 16384)
    c.learner.rows_per_microbatch = 4
    c.learner.share_prompts = False  # one copy of the prompt for the rollouts of a group that lie in one row
    c.learner.logprob_chunk = 4096  # tokens whose logits exist at once, at most; a CPU takes fewer
    c.learner.attention = "auto"  # by platform; or plain, chunked, flash (NVIDIA GPU), splash (TPU)
    c.learner.remat = False  # recompute layers in the backward pass
    c.learner.dtype = "float32"  # of the computation; or "bfloat16", as the next two
    c.learner.param_dtype = "float32"  # of the master weights
    c.learner.moment_dtype = "float32"  # of Adam's moments
    c.learner.moments_on = (
        "device"  # or "host": pinned memory of the host, and of each layer on the device for its step
    )
    c.learner.lora_rank = 0  # 0: all parameters are trained
    c.learner.lora_alpha = 16.0  # adapters are scaled by lora_alpha / lora_rank
    c.learner.lora_targets = "layers/.*_proj/kernel"  # regular expression on parameter paths

    c.mesh = ConfigDict()  # product = number of devices
    c.mesh.data = 1
    c.mesh.fsdp = 1
    c.mesh.expert = 1
    c.mesh.context = (
        1  # splits the tokens of rows, where one device does not hold a row; 2 * context divides row_length
    )
    c.mesh.tensor = 1

    # How the training set evolves: "coevolve", "blame" (a signal of ours), "random" (as many new tasks, without signals),
    # "static" (no new tasks), "oracle" (testbeds only), or the dotted path of a module of your own (docs/guides/add_strategy.md);
    # and the settings that are its own.
    c.strategy = strategy(arg.strategy)

    c.signals = ConfigDict()
    c.signals.window = 10  # W, scores looked back on for forgetting
    c.signals.rare_percent = 1.0  # theta; the paper's 5 calls nearly every one of our tools rare

    # Who explores: "scripted", "llm" (a model over the OpenAI protocol), "policy" (the one that is trained), or the dotted
    # path of a module of your own (docs/guides/add_explorer.md); and the settings that are its own.
    c.explorer = explorer(arg.explorer)

    c.evolution = ConfigDict()
    c.evolution.every = 10  # F, GRPO steps between evolutions
    c.evolution.overlap = 0  # steps that an evolution has beside training before D_t grows; 0: training waits
    # None in the last so many steps: what is born must be trained on. More than rollout.max_staleness.
    c.evolution.settle_steps = 10
    c.evolution.tasks = 24  # validated tasks wanted per evolution
    c.evolution.contexts = 24  # trajectories reflected on at most, per evolution
    c.evolution.rounds = 3  # R
    c.evolution.steps = 10  # S, environment steps per round
    c.evolution.proposals = 3  # tasks abstracted per context at most
    c.evolution.validate = True  # by execution; False is an ablation
    c.evolution.executions = (
        1  # of each proposal, in fresh environments; from 2 on those that differ are refused
    )

    c.evaluation = ConfigDict()
    c.evaluation.tasks = 192  # held-out synthetic tasks, made as D_0 is
    c.evaluation.balanced_tasks = 0  # and these besides, in which all tools come about equally often
    c.evaluation.balanced_candidates = 0  # tasks that they are chosen from
    c.evaluation.every = 20  # GRPO steps between evaluations on the way; 0: before and after only
    c.evaluation.samples = 2  # rollouts per task
    c.evaluation.temperature = 1.0
    c.evaluation.seed = 1234  # of the held-out tasks; the same for every run

    # Thresholds beyond which a step raises an alert (coevolve_jax/records/health.py says of what, and what it means).
    c.health = ConfigDict()
    c.health.patience = 3  # steps in a row before it is told in the terminal
    c.health.dead_groups = 0.7  # the paper's 0.5 and 0.3 are for rewards with more levels
    c.health.group_std = 0.05
    c.health.logprob = -0.02  # -0.05 for language; most tokens here are copies
    c.health.few_steps = 1.0
    c.health.many_steps = 50.0
    c.health.truncated = 0.2
    c.health.kept_groups = 0.2
    c.health.length_reward = 0.3
    c.health.malformed = 0.3
    c.health.invalid = 0.05

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 5  # GRPO steps
    c.checkpoint.keep = 2
    c.checkpoint.folder = ""  # where they lie, e.g. gs://BUCKET/RUN; "": checkpoints/ of the workdir
    c.logging = ConfigDict()
    c.logging.trajectories_every = 10  # steps between trajectory files
    c.logging.trajectories = 8  # trajectories per file
    c.logging.trackers = "tensorboard"  # tensorboard,wandb or dotted paths of modules
    return c
