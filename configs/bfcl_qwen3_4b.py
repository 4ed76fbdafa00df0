"""CoEvolve on BFCL multi-turn with Qwen3-4B-Instruct: the values of the paper.

Paper: arXiv 2604.15840, settings table and section 4. BFCL-v3 multi-turn base, success in percent: zero-shot
26.5, GRPO on static synthetic tasks 58.0, CoEvolve 63.0. Hardware there: 8 GPUs. Not run here, for lack of
weights and an accelerator: time and score are not known. docs/notes/memory.md says where the update fits.
SGLang serves the rollouts (docs/guides/serve_with_sglang.md), here from half of 8 GPUs:

    CUDA_VISIBLE_DEVICES=4,5,6,7 python experiments/serve.py --model=PATH_TO/Qwen3-4B-Instruct-2507 \\
        --port=30000 --context_length=25600 --max_running_requests=256 --dtype=bfloat16 -- --dp-size=4
    CUDA_VISIBLE_DEVICES=0,1,2,3 python experiments/main.py --config=configs/bfcl_qwen3_4b.py \\
        --workdir=runs/qwen3_4b --config.model=PATH_TO/Qwen3-4B-Instruct-2507 \\
        --config.mesh.fsdp=4 --config.engine.url=http://127.0.0.1:30000

Rules make the tasks (explorer=scripted). In the paper a model behind an endpoint makes them
(docs/guides/use_llm_explorer.md):

    --config=configs/bfcl_qwen3_4b.py:explorer=llm --config.explorer.base_url=https://HOST/v1 \\
        --config.explorer.model=MODEL --config.explorer.max_tokens=2048 --config.explorer.budget_money=100 \\
        --config.explorer.price_in=1.2 --config.explorer.price_out=6 --config.evolution.async_steps=5

Several of the paper's values are defaults (coevolve_jax/config/keys.py): N = 100, K = 8, W = 10, theta = 5%,
F = 10, 32 tasks per step, the learning rate. "ours" marks values that the paper does not give. They are those
of AgentEvolver, its code base's closest relative, as are the defaults of kl_coef and adam_b2.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import defaults, parse_arg


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(arg, strategy="coevolve", seed=0, engine="sglang", explorer="scripted")
    c = defaults(arg.strategy, arg.explorer)
    c.seed = arg.seed
    c.model = "Qwen3-4B-Instruct-2507"
    c.environment.toolsets = (
        *("GorillaFileSystem", "MathAPI", "MessageAPI", "TwitterAPI"),
        *("TicketAPI", "TradingBot", "TravelAPI", "VehicleControlAPI"),
    )

    c.data.leak_splits = ("test",)
    c.rollout.temperature = 0.9  # ours
    c.rollout.max_length = 25580  # ours
    c.rollout.max_new_tokens = 4096  # ours
    c.rollout.max_observation = 12000  # ours

    c.engine.name = arg.engine
    c.engine.max_concurrency = 256
    c.engine.cache_tokens = 2**20  # ours; 154 GB in bfloat16, of all devices together
    c.engine.timeout = 1200.0
    c.engine.patience = 900.0

    # Ours: sampler and learner are two programs in bfloat16. The bound takes the place of the clip, since one
    # update on fresh rollouts has a ratio of 1 everywhere. With rollout.max_staleness the clip acts too, and
    # clip_high = 0.28 is AgentEvolver's.
    c.learner.tis_cap = 2.0
    c.learner.skip_zero_variance_groups = False
    c.learner.pack_length = 25600
    c.learner.rows_per_microbatch = 8
    c.mesh.fsdp = 8

    c.evolution.tasks = 64  # ours
    c.evolution.contexts = 64  # ours
    c.evaluation.every = 0
    c.evaluation.temperature = 0.9
    return c
