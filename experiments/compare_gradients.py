"""Compares the gradient of a finished run's config with that of another config, on the run's last rollouts.

    python experiments/compare_gradients.py --workdir=runs/one --folder=runs/other

--folder holds the other config as config.json. It gets checks.json: name -> [value, bound, whether it holds].
coevolve_jax/harness/gradient.py explains the checks. Campaigns use this before they train a version.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags

from coevolve_jax.config import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "A finished run with config.logging.rollouts_every above 0.")
_FOLDER = flags.DEFINE_string("folder", None, "Folder of the other config.json; checks.json goes there too.")
flags.mark_flags_as_required(["workdir", "folder"])

STEPS = 2  # recorded steps whose rollouts make the gradient


def run(workdir: Path, folder: Path) -> None:
    """Writes folder/checks.json."""
    from coevolve_jax import build
    from coevolve_jax import config as configs
    from coevolve_jax.distributed import sharding
    from coevolve_jax.grpo.learner import Learner, frozen
    from coevolve_jax.harness.gradient import gradient_checks
    from coevolve_jax.loop.warm_start import initial_model
    from coevolve_jax.records import checkpoint, rollouts
    from coevolve_jax.records.files import write_text
    from coevolve_jax.records.workdir import checkpoints

    parent, child = configs.of_run(workdir), configs.of_run(folder)
    recorded = rollouts.steps(workdir, rollouts.ROLLOUTS)[-STEPS:]
    if not recorded:
        raise ValueError(f"{workdir} holds no rollouts: let it run with config.logging.rollouts_every=1.")
    mesh = sharding.make_mesh(**parent.mesh)
    policy = build.policy(initial_model(parent, workdir), mesh, build.trained_dtype(parent.learner))
    reference = frozen(policy.params, parent.learner.dtype)  # once for both configs
    policy.params = None  # frees memory
    learner = Learner(
        policy.config, parent.learner, reference, temperature=parent.rollout.temperature, mesh=mesh
    )
    restored = checkpoint.restore(checkpoints(parent, workdir), learner.abstract_state)
    if restored is None:
        raise ValueError(f"{workdir} holds no checkpoint: name the workdir of a finished run.")
    _, state, _ = restored
    steps = [rollouts.read_rollouts(workdir, step) for step in recorded]
    checks = gradient_checks(parent, child, policy.config, state.params, reference, steps, mesh)
    write_text(folder / "checks.json", json.dumps({name: list(check) for name, check in checks.items()}))
    for name, check in checks.items():
        bound = "" if check.bound is None else f", bound {check.bound:.4g}"
        print(f"{name:>8}  {check.value:.4g}{bound}{'' if check.ok else '  refused'}")


if __name__ == "__main__":
    command_line.start(lambda: run(Path(_WORKDIR.value), Path(_FOLDER.value)))
