"""Entry point of a benchmark's ranks: `python -m aiscale.bench FUNCTION OUT ARGUMENTS`, started by `ranks.on_ranks`."""

import json
import pkgutil
import sys
from pathlib import Path

from aiscale.bench.nodes import plug_in
from aiscale.distributed import connect

if __name__ == "__main__":
    function, out, arguments = sys.argv[1:]
    plug_in()
    world = connect("cpu")
    result = pkgutil.resolve_name(function)(world, *json.loads(arguments))
    if world.is_main:
        Path(out).write_text(json.dumps(result))
    world.close()
