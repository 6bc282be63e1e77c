"""The command `aiscale bench NAME [--json] [--quick]`: runs a benchmark, prints its table or its dictionary.

A benchmark is a function (quick=..., report=...) that returns a dictionary with a list "checks" (may be empty), and one
that prints this dictionary. The exit status is 0 when it ran and every check was met.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

#: name -> (what it measures, the function that measures, the function that prints)
BENCHMARKS = {
    "model": (
        "training and generation against transformers' GPT-2, with the floor of the matrix products",
        "aiscale.bench.model:bench_model",
        "aiscale.bench.model_tables:show_model",
    ),
    "ddp": (
        "a DDP step against its parts: the step without communication, and the all-reduce alone",
        "aiscale.bench.ddp:bench_ddp",
        "aiscale.bench.ddp:show_ddp",
    ),
    "bytes": (
        "bytes predicted and measured for every strategy, by collective and by category",
        "aiscale.bench.bytes:bench_bytes",
        "aiscale.bench.bytes:show_bytes",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {entry[0]}" for name, entry in BENCHMARKS.items())
    parser.add_argument("name", choices=BENCHMARKS, help=names)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model in a few rounds; judges nothing")


def run(args: argparse.Namespace) -> int:
    _, measure, show = BENCHMARKS[args.name]
    result = _find(measure)(quick=args.quick, report=lambda message: print(message, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _find(show)(result)
    return 0 if all(check["met"] for check in result["checks"]) else 1


def _find(name: str):
    """module:function, imported only when it is wanted: a benchmark imports what it compares with."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
