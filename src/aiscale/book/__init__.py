"""The notebooks as a book: find them, run them headless, check their form, and show them in a gallery.

    from aiscale import book
    book.run(["03"], {"steps": 5})          # -> [Result(name="03_ddp", state="passed", seconds=41.2, ...)]
    book.check("notebooks/03_ddp.ipynb")    # -> [] or what is wrong with it, a line each

    from aiscale.book.gallery import build_gallery      # loads nbconvert, which takes a second
    build_gallery()                         # -> build/gallery/index.html

A file each: `notebook` reads them, `form` checks them, `running` runs them and watches `execute`, in which papermill
works, `gallery` shows them, `command` is `aiscale notebooks`.
"""

from aiscale.book.form import check, strip
from aiscale.book.notebook import BookError, Header, Notebook, Parameter, notebooks, read
from aiscale.book.running import CELL_TIMEOUT_S, TIMEOUT_S, Failure, Result, run

__all__ = [
    "CELL_TIMEOUT_S",
    "TIMEOUT_S",
    "BookError",
    "Failure",
    "Header",
    "Notebook",
    "Parameter",
    "Result",
    "check",
    "notebooks",
    "read",
    "run",
    "strip",
]
