"""What notebooks import, `predict` and `check`, and what runs notebooks.

    from aiscale.lesson import predict
    guess = predict("bytes of a step", None, unit="bytes")     # the participant writes a number for None
    guess.against(measured)                                     # both, and their ratio

`guesses` is predict, `exercises` is check; `grading` and `comparing` are what graders are written with, `workbooks`
makes the participants' notebooks from the solutions, and `exercise_command` is `aiscale exercises`. `runner` is
`aiscale notebooks`, `slides` is `aiscale slides`, `notebook` finds notebooks and reads their first cell.
"""

from aiscale.lesson.exercises import check
from aiscale.lesson.guesses import MiB, predict
from aiscale.lesson.notebook import Header, LessonError, Notebook, notebooks, read
from aiscale.lesson.runner import Execution, execute
