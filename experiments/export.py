"""Writes files that other tools read: a run's tasks and rollouts, a benchmark's tasks, a merged policy.

    python experiments/export.py --to=parquet --run=runs/demo --output=runs/demo_tables
    python experiments/export.py --to=datasets --run=runs/demo --output=runs/demo_tasks
    python experiments/export.py --to=tfds --run=runs/demo --output=runs/demo_tasks
    python experiments/export.py --to=tfds --benchmark=bfcl --output=runs/bfcl_tasks \\
        --splits=train,development,test,sequential_train,sequential_test
    python experiments/export.py --to=policy --adapter=PEFT_FOLDER --model=BASE --output=runs/merged

parquet: tasks, trajectories and rollouts, with their columns in README.md. datasets: the training set, for
datasets.load_from_disk. tfds: the training set or a benchmark, for TensorFlow Datasets. policy: a base with
the adapters of a folder of peft, as a Hugging Face folder, which can be trained and served. Its weights have
the base's dtype, or --dtype; bfloat16 can round small adapters away, which is then told. The base is read in
the dtype of the run that trained the adapters, where a run of this package did.

coevolve_jax/exports/tables.py documents the columns, coevolve_jax/tfds_tasks.py those of tfds. The first
three need the extra of their name: pip install coevolve_jax[parquet]. A run with LoRA leaves its adapters in
policy/adapter.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags

from coevolve_jax import config as configs
from coevolve_jax.config import command_line

_TO = flags.DEFINE_enum(
    "to", None, ["parquet", "datasets", "tfds", "policy"], "What to write.", required=True
)
_RUN = flags.DEFINE_string("run", None, "Workdir of a run.")
_BENCHMARK = flags.DEFINE_string(
    "benchmark", None, "An environment family, for its benchmark's own tasks: --to=tfds only."
)
_SPLITS = flags.DEFINE_list("splits", ["train", "development", "test"], "Splits of the benchmark.")
_PROTOCOL = flags.DEFINE_string("protocol", "", "A named protocol of the benchmark, for the tasks' tools.")
_PYTHON = flags.DEFINE_string("python", "", "Interpreter of the environment family; none: this one.")
_ADAPTER = flags.DEFINE_string(
    "adapter", None, "With --to=policy: folder of LoRA adapters, as peft writes it."
)
_MODEL = flags.DEFINE_string(
    "model", None, "With --to=policy: the base; none: the one that the folder names."
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "With --to=policy: dtype of the written weights, which are summed in float32; none: the base's.",
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder to write; what is there of its kind is replaced.", required=True
)
NEEDED = {"parquet": _RUN, "datasets": _RUN, "policy": _ADAPTER}


def main() -> None:
    needed = NEEDED.get(_TO.value)
    if needed is not None and not needed.value:
        raise ValueError(f"--to={_TO.value} needs --{needed.name}.")
    try:
        {"parquet": to_parquet, "datasets": to_datasets, "tfds": to_tfds, "policy": to_policy}[_TO.value]()
    except OSError as error:
        unwritten = str(error.filename).startswith(_OUTPUT.value) or Path(_OUTPUT.value).is_file()
        told = f"--output={_OUTPUT.value} cannot be written ({error.strerror}): choose another."
        raise ValueError(told if unwritten else error) from None


def to_parquet() -> None:
    from coevolve_jax.exports import parquet

    for table, rows in parquet.write(_RUN.value, _OUTPUT.value).items():
        print(f"{rows:>8} rows in {Path(_OUTPUT.value) / table}.parquet")


def to_datasets() -> None:
    from coevolve_jax.exports import hf_datasets

    print(f"{hf_datasets.write(_RUN.value, _OUTPUT.value)} tasks in {_OUTPUT.value}")


def to_policy() -> None:
    from coevolve_jax import build, shipped
    from coevolve_jax.grpo import lora
    from coevolve_jax.models import hf_io, peft_io

    base = _MODEL.value or peft_io.base_of(_ADAPTER.value)
    if Path(_OUTPUT.value).resolve() == shipped.folder(base).resolve():
        raise ValueError(f"--output={_OUTPUT.value} is the base itself: name another folder.")
    configs.check_output("output", _OUTPUT.value, folder=True)
    adapters = peft_io.load(_ADAPTER.value, hf_io.load_config(base))
    policy = build.policy(base, dtype=adapters.base_dtype)
    dtype, notes = _DTYPE.value or hf_io.dtype_of(base), list(policy.chat.notes)
    own = policy.params, adapters.params, adapters.scale
    if dtype != "float32" and (lost := lora.rounded_away(*own, dtype)) > 0.5:
        notes.append(
            f"In {dtype}, {lost:.0%} of the weights that the adapters of {_ADAPTER.value} change round to "
            "the base's own: the written policy lacks these changes; --dtype=float32 keeps them."
        )
    hf_io.save(_OUTPUT.value, policy.config, lora.merge(*own), dtype)
    policy.save_words(_OUTPUT.value)
    for note in notes:
        print(note, file=sys.stderr)
    print(f"{base} with the adapters of {_ADAPTER.value} (rank {adapters.rank}) in {_OUTPUT.value}, {dtype}")


def to_tfds() -> None:
    from coevolve_jax import tfds_tasks

    if (_RUN.value is None) == (_BENCHMARK.value is None):
        raise ValueError("Give either --run or --benchmark.")
    if not _SPLITS.value:
        raise ValueError("--splits names no split of the benchmark: name some, separated by commas.")
    if _RUN.value:
        folder = tfds_tasks.write(_RUN.value, _OUTPUT.value)
        print(f"{len(tfds_tasks.read(_OUTPUT.value))} tasks in {folder}")
        return
    splits = splits_of(_BENCHMARK.value)
    folder = tfds_tasks.write_benchmark(_BENCHMARK.value, splits, _OUTPUT.value)
    for split in splits:
        print(f"{split:>16}  {len(tfds_tasks.read(_OUTPUT.value, folder.parent.name, split))} tasks")
    print(folder)


def splits_of(name: str) -> dict:
    """The tasks of a benchmark: split -> category -> tasks."""
    from coevolve_jax import envs

    family = envs.load(name, _PYTHON.value)
    settings = {part: family.settings([part], _PROTOCOL.value) for part in family.categories}
    settings = settings or {name: family.settings([], _PROTOCOL.value)}
    splits: dict[str, dict] = {}
    for split in _SPLITS.value:
        parts, known = splits.setdefault(split, {}), set()
        for part, chosen in settings.items():
            tasks = family.tasks(split, chosen)
            if not known.issuperset(t.id for t in tasks):  # not empty, nor a part under a second name
                parts[part] = tasks
                known.update(t.id for t in tasks)
    return splits


if __name__ == "__main__":
    command_line.start(main, ImportError, interrupted="--output may hold a part.")
