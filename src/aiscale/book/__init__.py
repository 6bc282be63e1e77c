"""The notebooks as a book: find them, run them headless, check their form, and build a gallery.

    from aiscale import book
    book.run(["03"], {"steps": 5})          # -> [Result(name="03_ddp", state="passed", seconds=41.2, ...)]
    book.check_form("notebooks/03_ddp.ipynb")    # -> [] or one line per problem

    from aiscale.book.gallery import build_gallery      # loads nbconvert, which takes a second
    build_gallery()                         # -> build/gallery/index.html

`notebook` reads them, `form` checks them, `running` starts and watches `execute`, which runs papermill, `gallery`
shows them, `command` is `aiscale notebooks`. `core` knows which cells are optional, and estimates a reader's
minutes, and `guesses` is `predict`, which lessons import. `exercises` is `check`, which exercises import; `grading` and
`comparing` are what graders are written with, `workbooks` makes the participants' notebooks from the solutions, and
`exercise_command` is `aiscale exercises`. `gpu` runs GPU kernels on any machine (appendix A2).
"""

from aiscale.book.exercises import check
from aiscale.book.form import check_form, strip
from aiscale.book.guesses import GB, KB, MB, GiB, GuessError, KiB, MiB, predict
from aiscale.book.notebook import BookError, Header, Notebook, Parameter, notebooks, read
from aiscale.book.running import CELL_TIMEOUT_S, TIMEOUT_S, Failure, Result, run
