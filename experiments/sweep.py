"""Prints the commands that run a comparison on several machines. It runs nothing.

    python experiments/sweep.py --on=slurm --machines=8 -- --config=configs/bfcl_headroom.py \\
        --arms=static,random,coevolve --seeds=0:8 --workdir=/shared/runs/headroom
    python experiments/sweep.py --on=shell --machines=2 -- ...
    python experiments/sweep.py --on=tpu --machines=4 --names=coevolve-{} --zone=ZONE -- ...

The flags after -- are those of experiments/compare.py. Each machine takes whole seeds (--shard=I/N), since
the arms of a seed share their initial state. All machines must share the folder --workdir. The last command
printed writes the tables.

Slurm signals a job five minutes before its time limit. Its runs then save, and it exits with status 75.
Submit it again to resume. This was not tested on Slurm.
"""

import argparse
import shlex
import sys

from absl import app, flags

_ON = flags.DEFINE_enum("on", "shell", ("shell", "slurm", "tpu"), "Where to run the commands.")
_MACHINES = flags.DEFINE_integer(
    "machines", 1, "Machines, or jobs of a Slurm array; each takes some of the seeds.", lower_bound=1
)
_HOURS = flags.DEFINE_integer("hours", 24, "Time limit of a Slurm job.", lower_bound=1)
_NAMES = flags.DEFINE_string("names", "coevolve-{}", "Names of the TPU VMs; {} is the number, from 0.")
_ZONE = flags.DEFINE_string("zone", "ZONE", "Zone of the TPU VMs.")
_FOLDER = flags.DEFINE_string(
    "folder", "coevolve_jax", "Folder of this checkout on a TPU VM, relative to home."
)

SLURM = """\
sbatch <<'END'
#!/bin/bash
#SBATCH --job-name=compare
#SBATCH --array=0-{last}
#SBATCH --gpus-per-task=1
#SBATCH --time={hours}:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
exec {command}
END"""


def main(argv) -> None:
    from coevolve_jax import shipped
    from coevolve_jax.comparison import plan

    own = argv[1:]
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for name in ("config", "arms", "workdir", "seeds", "shard"):
        parser.add_argument(f"--{name}", f"-{name}")
    try:
        found = vars(parser.parse_known_args(own)[0])
        given = {key: value for key, value in found.items() if value is not None}
        missing = {"config", "arms", "workdir"} - set(given)
        if missing:
            raise ValueError(
                f"After -- the flags of experiments/compare.py lack --{', --'.join(sorted(missing))}."
            )
        if "shard" in given:
            raise ValueError(
                f"--shard={given['shard']} is what sweep.py gives each machine: leave it out after --."
            )
        seeds, count = plan.parse_seeds(given.get("seeds", "0:3")), _MACHINES.value
        if _ON.value == "tpu" and len({name_of(i) for i in range(count)}) < count:
            raise ValueError(
                f"--names={_NAMES.value} names one VM for --machines={count}: put {{}} where the number goes."
            )
        if count > len(seeds):
            raise ValueError(
                f"--machines={count} is more than the {len(seeds)} seeds: each machine takes whole seeds."
            )
    except (argparse.ArgumentError, ValueError) as error:
        sys.exit(f"Error: {error}")
    program = ("coevolve", "compare") if shipped.IN_WHEEL else ("python", "experiments/compare.py")
    whole = [*program, *own]
    part = lambda i: shlex.join([*whole, f"--shard={i}/{count}"])
    if _ON.value == "slurm":
        command = f'{shlex.join(whole)} --shard="$SLURM_ARRAY_TASK_ID/{count}"'
        print(SLURM.format(last=count - 1, hours=_HOURS.value, command=command))
    for i in range(0 if _ON.value == "slurm" else count):
        if _ON.value == "tpu":
            there = shlex.quote(f"cd {_FOLDER.value} && {part(i)}")
            print(f"gcloud compute tpus tpu-vm ssh {name_of(i)} --zone={_ZONE.value} --command={there} &")
        else:
            print(part(i))
    print(f"# when all have ended:\n{shlex.join([*whole, '--only_read'])}")


def name_of(index: int) -> str:
    """The name of a TPU VM. Raises ValueError if --names is no pattern."""
    try:
        return _NAMES.value.format(index)
    except (IndexError, KeyError, ValueError, AttributeError):
        raise ValueError(
            f"--names={_NAMES.value} is no pattern of names: "
            "put {} where the number goes, and no other braces."
        ) from None


if __name__ == "__main__":
    app.run(main)
