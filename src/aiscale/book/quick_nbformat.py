"""nbformat, without the part of it that is slow to import. The package imports it before anything else.

jsonschema, with which nbformat validates, compiles a grammar of internationalised addresses when it is imported: one to
two seconds of processor time, for a check that no notebook needs. It does without where that package is missing, so for
the moment of the import it is.
"""

import sys

_GRAMMAR = "rfc3987_syntax"

if _GRAMMAR not in sys.modules:
    sys.modules[_GRAMMAR] = None  # makes `import rfc3987_syntax` raise ImportError
    import nbformat  # noqa: F401

    del sys.modules[_GRAMMAR]
