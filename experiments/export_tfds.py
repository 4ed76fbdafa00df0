"""Writes the training set of a run, D_t with its lineage, as a TFDS data set.

    python experiments/export_tfds.py --run=runs/demo --output=runs/demo_tasks

coevolve_jax/tfds_tasks.py says what its columns are, and reads it back. It needs `pip install -e .[tfds]`.
"""

import sys

from absl import app, flags, logging

_RUN = flags.DEFINE_string("run", None, "Workdir of a run.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the data set; one that is there is replaced.")
flags.mark_flags_as_required(["run", "output"])


def main(argv) -> None:
    if len(argv) > 1:
        sys.exit(f"Error: unexpected argument {argv[1]!r}: options begin with --, see --help.")
    logging.set_verbosity(logging.WARNING)
    try:
        from coevolve_jax import tfds_tasks

        folder = tfds_tasks.write(_RUN.value, _OUTPUT.value)
        print(f"{len(tfds_tasks.read(_OUTPUT.value))} tasks in {folder}")
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    app.run(main)
