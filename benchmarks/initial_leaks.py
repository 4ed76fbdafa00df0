r"""Counts leak control's refusals during the exploration of D_0, with and without the comparison of calls.

    JAX_PLATFORMS=cpu python benchmarks/initial_leaks.py --seeds=0,1,2 \
        --configs=configs/bfcl_tiny.py,configs/tau2_tiny.py

D_0 is explored as in a run, but without the limit on a task's length, which needs the policy's tokenizer.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import app, flags

_CONFIGS = flags.DEFINE_list(
    "configs", ["configs/bfcl_tiny.py"], "Config files, with their arguments if any."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of D_0.")
THRESHOLDS = (0.0, 0.88)  # values of config.data.leak_call_threshold


def main(argv) -> None:
    del argv
    from coevolve_jax import config as configs

    print(f"{'config':<34}{'threshold':>9}{'seed':>5}{'tasks':>6}{'proposed':>9}{'leaks':>6}  other refusals")
    for name in _CONFIGS.value:
        path, _, arg = name.partition(":")
        for threshold in THRESHOLDS:
            config = configs.override(configs.load_file(path, arg), {"data.leak_call_threshold": threshold})
            for seed, stats in explored(config, [int(seed) for seed in _SEEDS.value]):
                refused = dict(stats.refused)
                leaks = refused.pop("near_evaluation", 0)
                counts = f"{stats.added:>6}{stats.proposed:>9}{leaks:>6}"
                print(f"{name:<34}{threshold:>9}{seed:>5}{counts}  {refused or ''}", flush=True)


def explored(config, seeds):
    """Yields each seed with the SynthesisStats of its D_0."""
    from coevolve_jax import build
    from coevolve_jax.loop.initial import leak_guard
    from coevolve_jax.seeding import rng_for
    from coevolve_jax.synthesis.pipeline import SynthesisRequest
    from coevolve_jax.synthesis.task_pool import TaskPool

    family, roles = build.family(config), build.explorer(config, None, None)
    with build.env_pool(config) as pool:

        def explore(guard, scenarios, wanted, kind, seed):
            tasks = TaskPool(key=family.task_key)
            synthesizer = build.synthesizer(config, roles, pool, guard)
            request = SynthesisRequest(wanted, kind, step=0, rng=rng_for(seed, kind))
            return tasks, synthesizer.synthesize_unguided(tasks, scenarios, request, all_or_none=True)

        e = config.evaluation
        held_out, _ = explore(None, build.held_out_scenarios(config), e.tasks, "held_out", e.seed)
        guard, scenarios = leak_guard(config, list(held_out)), build.scenarios(config)
        wanted = config.testbed.candidates if "testbed" in config else config.data.initial_tasks
        for seed in seeds:
            yield seed, explore(guard, scenarios, wanted, "initial", seed)[1]


if __name__ == "__main__":
    app.run(main)
