"""Writes the leaderboard from comparisons' folders or bundles: a page, a CSV and a plot per testbed.

python experiments/leaderboard.py --testbed=bfcl=runs/leaderboard --out=docs/results
python experiments/leaderboard.py --testbed=bfcl=BUNDLE,BUNDLE --testbed=textworld=runs/ladder --out=OUT
"""

import re
from pathlib import Path

from absl import flags

from coevolve_jax.config import command_line

_TESTBED = flags.DEFINE_multi_string(
    "testbed", [], "NAME=FOLDER[,FOLDER]: comparisons' folders or bundles of one plan; once for each testbed."
)
_MODULES = flags.DEFINE_list(
    "modules", [], "Methods from elsewhere, by their module's dotted path, that are imported for their mark."
)
_OUT = flags.DEFINE_string("out", None, "Folder for leaderboard.md and leaderboard/.")


def run() -> None:
    from coevolve_jax import config as configs
    from coevolve_jax.comparison import leaderboard, leaderboard_page, testbed

    if not (_TESTBED.value and _OUT.value):
        raise ValueError("Give --testbed and --out, see --help.")
    configs.check_output("out", _OUT.value, folder=True)
    boards = []
    for text in _TESTBED.value:
        name, _, paths = text.partition("=")
        if not (re.fullmatch(r"[\w-]+", name) and paths) or any(b.testbed.name == name for b in boards):
            raise ValueError(f"--testbed={text!r} is no new NAME=FOLDER such as bfcl=runs/leaderboard.")
        boards.append(
            leaderboard.board(testbed.load(name, list(map(Path, paths.split(","))), _MODULES.value))
        )
    print(leaderboard_page.write(boards, Path(_OUT.value)))


if __name__ == "__main__":
    command_line.start(run, interrupted="nothing is written before all is read.")
