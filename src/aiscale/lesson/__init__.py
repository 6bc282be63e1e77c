"""What notebooks import, `predict` and `check`, and what runs notebooks."""

import warnings

from aiscale import environment
from aiscale.lesson.exercises import check
from aiscale.lesson.guesses import MiB, predict
from aiscale.lesson.notebook import Header, LessonError, Notebook, notebooks, read
from aiscale.lesson.room import hand
from aiscale.lesson.runner import Execution, execute
from aiscale.lesson.seat import check_seat

# A lesson's `!torchrun` inherits both.
environment.shorten_temporary_folder()
environment.meet_at_loopback()
# transformers imports tqdm, which misses ipywidgets in a kernel: no lesson shows such a bar.
warnings.filterwarnings("ignore", "IProgress not found")
