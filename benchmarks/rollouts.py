"""Times a step's rollouts beside those of another checkout of this repository.

    git worktree add ../before main
    python benchmarks/rollouts.py --config=configs/bfcl_tiny.py --against=../before
    python benchmarks/rollouts.py --case=generate-small --against=../before    # a case of benchmarks/cases.py

Each checkout is a process of its own, stopped while the other one works: their steps take turns. The weights
never change, so both give the same trajectories if their engines agree.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def prepare(job: dict):
    """The worker's side, in the checkout that PYTHONPATH names."""
    if job["case"]:
        return prepare_case(job["case"])
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from coevolve_jax import build
    from coevolve_jax import config as configs
    from coevolve_jax.loop.collect import Roller
    from coevolve_jax.seeding import rng_for
    from coevolve_jax.strategies.base import trajectories_of
    from coevolve_jax.strategies.batches import collect_batch
    from coevolve_jax.synthesis.pipeline import SynthesisRequest
    from coevolve_jax.synthesis.task_pool import TaskPool

    file, _, arg = job["config"].partition(":")
    c = configs.load_file(file, arg)
    policy = build.policy(c.model)
    env_pool = build.env_pool(c)
    engine = build.engine(c, policy)
    agent = build.agent(c, policy, engine, env_pool)
    tasks, step = TaskPool(), 0
    build.synthesizer(c, build.explorer(c), env_pool, None).synthesize_unguided(
        tasks,
        build.scenarios(c),
        SynthesisRequest(wanted=c.data.initial_tasks, kind="initial", step=0, rng=rng_for(c.seed, "initial")),
    )

    def run() -> dict:
        nonlocal step
        busy = time.process_time()
        made = trajectories_of(collect_batch(c, step, tasks, Roller(c, agent, step)))
        busy, step = time.process_time() - busy, step + 1
        engine.update_weights(policy.params, step)  # drops the cache, as in a run
        digest = hashlib.sha256(b"".join(t.ids.tobytes() for t in made)).hexdigest()
        return {"processors": busy, "sampled": sum(int(t.mask.sum()) for t in made), "digest": digest}

    def close() -> dict:
        agent.close()
        engine.close()
        env_pool.shutdown()
        return {}

    return {}, {"run": run, "close": close}


def prepare_case(name: str):
    """Like `prepare`, with a case's messages in place of a step's rollouts."""
    import cases

    from coevolve_jax import event_loop
    from coevolve_jax.models import hf_io
    from coevolve_jax.rollout.engine import Request, Sampling
    from coevolve_jax.rollout.native.engine import NativeEngine

    case = cases.CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        cases.write(case, Path(folder))
        _, data = cases.read(Path(folder))
        model_config, params = hf_io.load(Path(folder) / "policy")
    length = case.prompt + case.completion
    engine = NativeEngine(
        model_config, params, slots=case.rows, max_length=length, max_new_tokens=case.completion, seed=0
    )
    sampling = Sampling(temperature=1.0, max_new_tokens=case.completion)
    requests = [Request(i, ids, sampling, seed=i) for i, ids in enumerate(data["prompts"])]

    def run() -> dict:
        busy = time.process_time()
        made = event_loop.run(engine.generate(requests))
        engine.release(range(case.rows))
        busy = time.process_time() - busy
        digest = hashlib.sha256(b"".join(c.ids.tobytes() + c.logprobs.tobytes() for c in made)).hexdigest()
        return {"processors": busy, "sampled": sum(len(c.ids) for c in made), "digest": digest}

    def close() -> dict:
        engine.close()
        return {}

    return {}, {"run": run, "close": close}


def main(_) -> None:
    checkouts = {"here": ROOT, "there": Path(_AGAINST.value).resolve()}
    with tempfile.TemporaryDirectory() as logs:
        workers = {
            name: Worker(
                Path(sys.executable),
                Path(__file__),
                {"config": _CONFIG.value, "case": _CASE.value},
                Path(logs) / f"{name}.log",
                {**os.environ, "PYTHONPATH": str(folder), WORKER: "1"},
            )
            for name, folder in checkouts.items()
        }
        steps: dict[str, list[dict]] = {name: [] for name in workers}
        for _ in range(_COMPILING.value + _STEPS.value):
            for name, worker in workers.items():
                steps[name].append(worker.ask("run"))
        for worker in workers.values():
            worker.ask("close")
            worker.close()
    pairs = list(zip(*steps.values(), strict=True))
    print(f"{os.cpu_count()} cores; {_CASE.value or _CONFIG.value}; {len(pairs)} steps, in turn")
    for name, folder in checkouts.items():
        first = [f"{s['seconds']:.1f}" for s in steps[name][: _COMPILING.value]]
        timed = steps[name][_COMPILING.value :]
        seconds, busy, tokens = (
            statistics.median(s[k] for s in timed) for k in ("seconds", "processors", "sampled")
        )
        print(
            f"{name} ({folder.name}): the first steps {', '.join(first)} s; then {seconds:.2f} s per step "
            f"(median of {len(timed)}), {busy:.2f} s of processors, {tokens / seconds:.0f} tokens sampled "
            f"per second"
        )
    for key in ("seconds", "processors"):
        ratios = [there[key] / here[key] for here, there in pairs[_COMPILING.value :]]
        print(
            f"{key}, there over here: {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f})"
        )
    same = "tokens and log-probabilities" if _CASE.value else "tokens"
    print(f"steps of equal {same}: {sum(a['digest'] == b['digest'] for a, b in pairs)} of {len(pairs)}")


WORKER = "COEVOLVE_BENCHMARK_WORKER"
if __name__ == "__main__":
    if os.environ.get(WORKER):
        from protocol import serve

        serve(prepare)
    else:
        from absl import app, flags
        from protocol import Worker

        _CONFIG = flags.DEFINE_string(
            "config", "configs/bfcl_tiny.py", "Config file, FILE or FILE:ARGUMENTS."
        )
        _CASE = flags.DEFINE_string(
            "case", "", "A case of benchmarks/cases.py that generates, instead of it."
        )
        _AGAINST = flags.DEFINE_string("against", None, "Folder of the other checkout.", required=True)
        _COMPILING = flags.DEFINE_integer("compiling", 3, "First steps, in which programs are compiled.")
        _STEPS = flags.DEFINE_integer("steps", 5, "Steps to time.", lower_bound=1)
        app.run(main)
