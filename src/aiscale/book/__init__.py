"""The notebooks as a book: find them, run them headless, check their anatomy, and show them in a gallery.

    from aiscale import book
    book.run(["03"], {"steps": 5})          # -> [Result(name="03_ddp", state="passed", seconds=41.2, ...)]
    book.check("notebooks/03_ddp.ipynb")    # -> [] or what is wrong with it, a line each
    book.build_gallery()                    # -> build/gallery/index.html

See `aiscale.book.notebook` for the form of a notebook, `anatomy` for the rules, `running` for what a run guarantees.
"""

from aiscale.book import quick_nbformat  # noqa: F401  first of all: it makes the others quick to import
from aiscale.book.anatomy import check, strip
from aiscale.book.gallery import build_gallery
from aiscale.book.notebook import BookError, Header, Notebook, Parameter, notebooks, read
from aiscale.book.results import Failure, Result
from aiscale.book.running import CELL_TIMEOUT_S, TIMEOUT_S, run

__all__ = [
    "CELL_TIMEOUT_S",
    "TIMEOUT_S",
    "BookError",
    "Failure",
    "Header",
    "Notebook",
    "Parameter",
    "Result",
    "build_gallery",
    "check",
    "notebooks",
    "read",
    "run",
    "strip",
]
