"""The names of `import coevolve_jax` for type checkers. At run time each is imported on first access."""

from coevolve_jax import build as build
from coevolve_jax import config as config
from coevolve_jax import tfds_tasks as tfds_tasks
from coevolve_jax import train as train
from coevolve_jax.analysis.loading import load_run as load_run
from coevolve_jax.analysis.report import write_report as write_report
from coevolve_jax.analysis.summary import summary_table as summary_table
from coevolve_jax.loop import evaluate as evaluate
from coevolve_jax.models import hf_io as hf_io
from coevolve_jax.models import peft_io as peft_io
from coevolve_jax.models.decoder import Decoder as Decoder
from coevolve_jax.models.decoder import ModelConfig as ModelConfig
from coevolve_jax.planning import plan as plan
from coevolve_jax.records import checkpoint as checkpoint
from coevolve_jax.records.workdir import fork as fork
from coevolve_jax.synthesis.task_pool import TaskPool as TaskPool
from coevolve_jax.types import Call as Call
from coevolve_jax.types import Evidence as Evidence
from coevolve_jax.types import Group as Group
from coevolve_jax.types import Hint as Hint
from coevolve_jax.types import Lineage as Lineage
from coevolve_jax.types import Outcome as Outcome
from coevolve_jax.types import Signal as Signal
from coevolve_jax.types import Step as Step
from coevolve_jax.types import Task as Task
from coevolve_jax.types import TrainingSample as TrainingSample
from coevolve_jax.types import Trajectory as Trajectory
from coevolve_jax.types import Turn as Turn

__version__: str
