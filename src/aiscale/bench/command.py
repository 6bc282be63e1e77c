"""The command `aiscale bench NAME [--json] [--quick]`: runs a benchmark and prints its table or JSON.

`bench study`, `compare` and `report` work on files: see `aiscale.bench.study`.

A benchmark NAME is `aiscale.bench.NAME`, imported when needed, with bench_NAME(quick=..., report=...), which returns a
dictionary with a list "checks" (may be empty), and show_NAME, which prints it. The exit status is 0 if the benchmark
ran and met every check.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys

from aiscale.config import ConfigError

#: name -> what it measures
BENCHMARKS = {
    "model": "training and generation against transformers' GPT-2, with the floor of the matrix products",
    "bytes": "bytes predicted and measured for every strategy, by collective and by category",
    "radius": "Radius against dense all-reduces and competitors, on a link as slow as published",
    "gpu": "GPT-2 124M and 355M on this GPU, in bf16 and compiled: tokens/s, MFU, memory",
}

#: those that work on files -> what they do
STUDIES = {
    "study": "run the cells of FILE.toml, or of the kit (laptop, node, quick), and keep all results in --out",
    "compare": "put the results of two studies, A.csv and B.csv, side by side",
    "report": "write a page, self-contained HTML, of the results in A.csv",
}

#: options that only one benchmark has: as they are written, and whose they are
_OWN = {"sizes": ("--size", "gpu"), "batch": ("--batch", "gpu"), "link": ("--link", "radius")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {what}" for name, what in {**BENCHMARKS, **STUDIES}.items())
    parser.add_argument("name", choices=[*BENCHMARKS, *STUDIES], metavar="BENCHMARK", help=names)
    parser.add_argument("files", nargs="*", metavar="FILE", help="of study, compare and report")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure less and shorter, mostly without checks: a test of the benchmark itself",
    )
    own = parser.add_argument_group("options of bench gpu only")
    own.add_argument(
        "--size",
        dest="sizes",
        action="append",
        metavar="SIZE",
        help="the model: 124M, 355M, 774M or 1558M; may be repeated",
    )
    own.add_argument(
        "--batch", type=int, metavar="N", help="sequences of 1024 tokens in a step (default: as many as fit)"
    )
    own = parser.add_argument_group("options of bench radius only")
    own.add_argument(
        "--link", choices=("emulated", "shaped"), help="links emulated by the ranks, or slowed by the kernel on nodes"
    )
    own = parser.add_argument_group("options of bench study only")
    own.add_argument("--out", metavar="FILE", help="finished runs of bench study; the page of report")
    own.add_argument("--budget", type=float, metavar="MINUTES", help="begin no run that would end later")
    own.add_argument("--list", action="store_true", help="of bench study: name the runs of a round and exit")


def run(args: argparse.Namespace) -> int:
    if args.name in STUDIES:
        from aiscale.bench.study import command

        return command.run(args)
    if args.files or args.list or args.out or args.budget is not None:
        raise ConfigError(
            f"bench {args.name} takes no file, --out, --list or --budget: those are for bench {', '.join(STUDIES)}"
        )
    own = {name: getattr(args, name) for name in _OWN if getattr(args, name) is not None}
    for flag, owner in (_OWN[name] for name in own):
        if owner != args.name:
            raise ConfigError(f"bench {args.name} takes no {flag}: only bench {owner} does")
    if own.get("batch", 1) < 1:
        raise ConfigError(f"--batch is {args.batch}: it must be at least 1")
    report = functools.partial(print, file=sys.stderr, flush=True)
    benchmark = importlib.import_module(f"aiscale.bench.{args.name}")
    result = getattr(benchmark, f"bench_{args.name}")(quick=args.quick, report=report, **own)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        getattr(benchmark, f"show_{args.name}")(result)
    return 0 if all(check["met"] for check in result["checks"]) else 1
