"""One rank of a script, which writes what it held at most and what it sent: judge.py starts it.

torchrun measured_rank.py FOLDER SCRIPT.py ARGUMENTS
"""

import json
import os
import runpy
import sys
from pathlib import Path

# Before init_process_group: torch then records what is sent.
from aiscale.measure import traffic
from aiscale.measure.meter import allocated_bytes

folder, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))


def train():
    runpy.run_path(script, run_name="__main__")


with traffic.count() as sent:
    _, held = allocated_bytes(train)
found = {"peak_bytes": max(held), "sent": {operation: count.payload_bytes for operation, count in sent.items()}}
Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
