"""Prints the commands that run a comparison, or campaigns, on several machines. It runs nothing.

    python experiments/sweep.py --on=slurm --machines=8 -- --config=configs/bfcl_headroom.py \\
        --arms=static,random,coevolve --seeds=0:8 --workdir=/shared/runs/headroom
    python experiments/sweep.py --on=shell --machines=2 -- ...
    python experiments/sweep.py --on=tpu --machines=4 --names=coevolve-{} --zone=ZONE -- ...
    python experiments/sweep.py --of=campaigns --machines=2 -- --config=configs/bfcl_harness.py \\
        --workdir=/shared/runs/harness

The flags after -- are those of experiments/compare.py. Each machine takes whole seeds (--shard=I/N), since
the arms of a seed share their initial state. All machines must share the folder --workdir. The last command
printed writes the tables.

With --of=campaigns they are those of experiments/evolve_harness.py. Machine I runs the campaign of
config.harness.seed I in WORKDIR/campaign_I. All share the runs in WORKDIR/store: what one of them makes, the
others wait for and take.

A TPU VM goes on when the connection ends, and writes what the program says to ~/sweep.log.

Slurm signals a job five minutes before its time limit. Its runs then save, and it exits with status 75.
Submit it again to resume. This was not tested on Slurm.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence

from absl import app, flags

from coevolve_jax import shipped
from coevolve_jax.config import parse_flags

_ON = flags.DEFINE_enum("on", "shell", ("shell", "slurm", "tpu"), "Where to run the commands.")
_OF = flags.DEFINE_enum("of", "comparison", ("comparison", "campaigns"), "What is run.")
_MACHINES = flags.DEFINE_integer(
    "machines",
    1,
    "Machines, or jobs of a Slurm array; each takes some of the seeds, or a campaign.",
    lower_bound=1,
)
_HOURS = flags.DEFINE_integer("hours", 24, "Time limit of a Slurm job.", lower_bound=1)
_NAMES = flags.DEFINE_string("names", "coevolve-{}", "Names of the TPU VMs; {} is the number, from 0.")
_PROJECT = flags.DEFINE_string("project", "PROJECT", "Google Cloud project of the TPU VMs.")
_ZONE = flags.DEFINE_string("zone", "ZONE", "Zone of the TPU VMs.")
_FOLDER = flags.DEFINE_string(
    "folder", "coevolve_jax", "Folder of this checkout on a TPU VM, relative to home."
)

SLURM = """\
sbatch <<'END'
#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --time={hours}:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
exec {command}
END"""


def main(argv) -> None:
    count = _MACHINES.value
    behind = len(argv) - len(sys.argv[[*sys.argv, "--"].index("--") + 1 :])  # the first word after --
    # A shipped config by its name that holds everywhere, and not by its path on this machine.
    own = [re.sub(rf"^(--?config=){re.escape(str(shipped.ROOT))}/", r"\1", word) for word in argv[behind:]]
    try:
        if behind > 1 or not (own or ["-"])[0].startswith("-"):
            raise ValueError(f"unexpected argument {argv[1]!r}: options begin with --, see --help.")
        part, after = (comparison if _OF.value == "comparison" else campaigns)(own, count)
        if _ON.value == "tpu" and len({name_of(i) for i in range(count)}) < count:
            raise ValueError(
                f"--names={_NAMES.value} names one VM for --machines={count}: put {{}} where the number goes."
            )
    except (argparse.ArgumentError, ValueError) as error:
        sys.exit(f"Error: {error}")
    if _ON.value == "slurm":
        command = part('"$SLURM_ARRAY_TASK_ID"')
        print(SLURM.format(last=count - 1, hours=_HOURS.value, command=command))
    for i in range(0 if _ON.value == "slurm" else count):
        if _ON.value == "tpu":
            there = shlex.quote(
                f"cd {_FOLDER.value} && {{ PATH=~/venv-learner/bin:$PATH nohup setsid {part(str(i))} "
                ">> ~/sweep.log 2>&1 < /dev/null & }"
            )
            place = f"--project={_PROJECT.value} --zone={_ZONE.value}"
            print(f"gcloud compute tpus tpu-vm ssh {name_of(i)} {place} --command={there}")
        else:
            print(part(str(i)))
    print(after)


def comparison(own: list[str], count: int) -> tuple[Callable[[str], str], str]:
    """Returns index -> the command of a machine, in a shell's words, and what comes after them all."""
    from coevolve_jax.comparison import plan

    program = shipped.command("compare")
    given, rest = parsed(own, program, "config", "arms", "workdir", optional=("seeds", "shard"))
    if changes := [word for word in rest if word.lstrip("-").startswith("config.")]:
        key = changes[0].lstrip("-").removeprefix("config.")
        raise ValueError(f"{changes[0]} is no flag of {program}: give --set={key}.")
    if "shard" in given:
        raise ValueError(
            f"--shard={given['shard']} is what {shipped.command('sweep')} gives each machine: "
            "leave it out after --."
        )
    seeds = plan.parse_seeds(given.get("seeds", "0:3"))
    if count > len(seeds):
        raise ValueError(
            f"--machines={count} is more than the {len(seeds)} seeds: each machine takes whole seeds."
        )
    plan.cells([name.strip() for name in given["arms"].split(",")], seeds)  # refuses what it would refuse
    whole = f"{program} {shlex.join(own)}"
    return (
        lambda index: f"{whole} --shard={index}/{count}",
        f"# when all have ended:\n{whole} --only_read",
    )


def campaigns(own: list[str], count: int) -> tuple[Callable[[str], str], str]:
    """Returns the same for campaigns."""
    program = shipped.command("harness")
    given, rest = parsed(own, program, "config", "workdir", optional=("store", "config.harness.seed"))
    if seed := given.get("config.harness.seed"):
        raise ValueError(
            f"--config.harness.seed={seed} is what {shipped.command('sweep')} gives each machine: "
            "leave it out after --."
        )
    workdir = given["workdir"].rstrip("/")
    whole = [f"--config={given['config']}", *rest, f"--store={given.get('store', workdir + '/store')}"]
    into = shlex.quote(f"--workdir={workdir}/campaign_")
    return (
        lambda index: f"{program} {shlex.join(whole)} {into}{index} --config.harness.seed={index}",
        f"# each campaign has a page of its own: {shlex.quote(workdir)}/campaign_*/report.html",
    )


def parsed(
    own: list[str], program: str, *needed: str, optional: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Returns the values of some flags of a program, and its other words."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for flag in (*needed, *optional):
        parser.add_argument(f"--{flag}", f"-{flag}")
    found, rest = parser.parse_known_args(own)
    given = {key: value for key, value in vars(found).items() if value is not None}
    if missing := [flag for flag in needed if flag not in given]:
        raise ValueError(f"After -- the flags of {program} lack --{', --'.join(missing)}.")
    return given, rest


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
    app.run(main, flags_parser=parse_flags)
