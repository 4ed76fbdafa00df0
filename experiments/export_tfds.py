"""Writes tasks as a TFDS data set: the training set of a run, or a benchmark's own tasks by split.

    python experiments/export_tfds.py --run=runs/demo --output=runs/demo_tasks
    python experiments/export_tfds.py --benchmark=bfcl --output=runs/bfcl_tasks \\
        --splits=train,development,test,sequential_train,sequential_test

coevolve_jax/tfds_tasks.py documents the columns, and reads the data set. It needs `pip install -e .[tfds]`.
"""

import sys

from absl import app, flags, logging

_RUN = flags.DEFINE_string("run", None, "Workdir of a run.")
_BENCHMARK = flags.DEFINE_string("benchmark", None, "An environment family, for its benchmark's own tasks.")
_SPLITS = flags.DEFINE_list("splits", ["train", "development", "test"], "Splits of the benchmark.")
_PROTOCOL = flags.DEFINE_string("protocol", "", "A named protocol of the benchmark, for the tasks' tools.")
_PYTHON = flags.DEFINE_string("python", "", "Interpreter of the environment family; none: this one.")
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for the data set; an existing data set is replaced.", required=True
)


def main(argv) -> None:
    if len(argv) > 1:
        sys.exit(f"Error: unexpected argument {argv[1]!r}: options begin with --, see --help.")
    logging.set_verbosity(logging.WARNING)
    try:
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
    except OSError as error:
        unwritten = str(error.filename).startswith(_OUTPUT.value)
        told = f"--output={_OUTPUT.value} cannot be written ({error.strerror}): choose another."
        sys.exit(f"Error: {told if unwritten else error}")
    except (ImportError, ValueError) as error:
        sys.exit(f"Error: {error}")


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
    app.run(main)
