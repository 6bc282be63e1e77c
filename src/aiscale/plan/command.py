"""`aiscale plan`: how many nodes, which layout, how long, does it fit.

aiscale plan --model forge-m --machine frontier --nodes 64
aiscale plan --model gpt3-175b --machine selene --nodes 128 --layout tp=8,pp=16,micro_batch=1 --json
aiscale plan --model deepseek-v3 --machine dgx-h100 --nodes 256 --precision fp8 --layout pp=16,ep=64
aiscale plan --model llama-8b --experts 16 --top-k 2 --machine dgx-b200 --nodes 8
aiscale plan --rows runs.csv --json
aiscale plan --page build/planner        # sliders in a browser, which computes by itself
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import replace
from typing import get_type_hints

from aiscale.errors import ConfigError, hint
from aiscale.plan.answer import Answer, plan
from aiscale.plan.config.run import as_type
from aiscale.plan.hardware import platform_of
from aiscale.plan.layout import PROGRAMS, SHAPES, Layout, Shape, Software, shape_named
from aiscale.plan.machines import find_machine
from aiscale.plan.presets import presets
from aiscale.plan.search import Ranking, search, tuned
from aiscale.plan.sheet import page

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
#: Options that change the named model's shape: {field of Shape: what it is}.
SHAPE_OPTIONS = {
    "kv_heads": "heads of keys and values (grouped queries)",
    "experts": "experts of a layer",
    "top_k": "experts that a token is sent to",
    "expert_ffn": "width of one expert (default: the model's MLP)",
    "shared_experts": "experts that every token meets",
    "dense_layers": "first layers that have an MLP instead of experts",
    "kv_rank": "width of compressed keys and values (latent attention, MLA)",
    "q_rank": "width of compressed queries (the same)",
    "rope_width": "rotated entries of a head (the same)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help=f"a preset, or one of {', '.join(SHAPES)}")
    parser.add_argument(
        "--machine", metavar="NAME", help="a machine of the catalogue, such as frontier"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes of the job (default: 1)"
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", help="sequences a step (default: the preset's, or 2048)"
    )
    parser.add_argument(
        "--seq", type=int, metavar="N", help="tokens of a sequence (default: the preset's)"
    )
    for name, meaning in SHAPE_OPTIONS.items():
        parser.add_argument(_option(name), type=int, metavar="N", help=meaning)
    parser.add_argument(
        "--capacity",
        type=float,
        metavar="X",
        help="tokens that an expert takes over a balanced router's (default: none is dropped)",
    )
    parser.add_argument(
        "--tokens", type=float, metavar="N", help="the budget (default: 20 a parameter)"
    )
    parser.add_argument(
        "--precision", default="bf16", choices=("fp32", "tf32", "fp16", "bf16", "fp8")
    )
    parser.add_argument(
        "--program", choices=tuple(PROGRAMS), help="what trains; it decides the band, too"
    )
    parser.add_argument(
        "--layout",
        metavar="KEY=N,...",
        help="this layout instead of the best, such as tp=4,pp=2 or ep=8,cp=2,cp_kind=all-to-all",
    )
    parser.add_argument("--rows", metavar="FILE", help="a CSV of runs, answered row by row")
    parser.add_argument(
        "--page", metavar="FOLDER", help="write a web page of sliders that plans in the browser"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    if args.rows:
        return _rows(args)
    for name in ("model", "machine"):
        if not getattr(args, name):
            raise ConfigError(
                f"--{name} is missing: "
                "try aiscale plan --model forge-m --machine frontier --nodes 64"
            )
    answer, ranking = choose(args)
    tokens = args.tokens
    if tokens is None:
        tokens = TOKENS_PER_PARAMETER * answer.shape.active_parameters
    if not 0 < tokens < 1e18:
        raise ConfigError(f"--tokens is {tokens:g}: it must be greater than 0 and less than 10^18")
    if args.json:
        print(json.dumps(_json(args, answer, ranking, tokens)))
    else:
        print(page(answer, f"{args.model} on {args.machine}", tokens, ranking))
    return 0 if answer.fits and answer.fits_host is not False else 1


def choose(args: argparse.Namespace) -> tuple[Answer, Ranking | None]:
    """The layout of --layout, or the best of all with the ranking of the others."""
    shape, batch = find_shape(args), batch_of(args)
    platform = platform_of(find_machine(args.machine))
    software = PROGRAMS.get(args.program) or tuned(platform)
    if not 1 <= args.nodes <= 1_000_000:
        raise ConfigError(f"--nodes is {args.nodes}: it must be at least 1 and at most 1000000")
    gpus = args.nodes * platform.gpus_per_node
    if args.layout:
        layout = _layout(args.layout, gpus, batch, args.precision, software)
        return plan(shape, layout, platform), None
    return (ranking := search(shape, platform, gpus, batch, args.precision, software)).best, ranking


def find_shape(args: argparse.Namespace) -> Shape:
    """The named model, with what the options change."""
    names = ("seq", "capacity", *SHAPE_OPTIONS)
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(shape_named(args.model), **given)


def batch_of(args: argparse.Namespace) -> int:
    default = presets().get(args.model, {}).get("training", {}).get("batch", 2048)
    batch = default if args.batch is None else args.batch
    if not 1 <= batch <= 10**8:
        raise ConfigError(f"--batch is {batch}: it must be at least 1 and at most 10^8 sequences")
    return batch


def _layout(text: str, gpus: int, batch: int, precision: str, software: Software) -> Layout:
    """ "tp=4,pp=2,fsdp=true" as a layout of `gpus` devices; dp is what remains."""
    elsewhere = ("software", "precision", "global_batch")  # they have options of their own, or none
    kinds = {key: kind for key, kind in get_type_hints(Layout).items() if key not in elsewhere}
    values: dict[str, object] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in kinds:
            raise ConfigError(f"--layout: unknown key {key!r}: {hint(key, kinds)}")
        values[key] = as_type(kinds[key], value, f"--layout: {key}")
    layout = Layout(precision=precision, global_batch=batch, software=software, **values)
    others = layout.tp * layout.pp * layout.cp
    if "dp" not in values and others and gpus % others == 0:
        layout = replace(layout, dp=gpus // others)
    if layout.gpus != gpus:
        product = (
            f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.gpus}"
        )
        raise ConfigError(
            f"--layout: {product} devices, but the nodes have {gpus}: change one of them"
        )
    schedule = (
        "interleaved" if layout.virtual_stages > 1 and "schedule" not in values else layout.schedule
    )
    return replace(layout, schedule=schedule)


def _json(args: argparse.Namespace, answer: Answer, ranking: Ranking | None, tokens: float) -> dict:
    asked = {"model": args.model, "machine": args.machine, "nodes": args.nodes}
    asked |= {"batch": answer.layout.global_batch, "seq": answer.shape.seq}
    result = asked | answer.to_dict()
    days, node_hours = answer.days(tokens), answer.node_hours(tokens)
    result |= {
        "tokens": tokens,
        "days": days,
        "days_band": answer.band(days),
        "node_hours": node_hours,
    }
    result |= {"node_hours_band": answer.band(node_hours), "energy_kWh": answer.energy_kwh(tokens)}
    result["stages_GB"] = [
        {k: round(v / 1e9, 3) for k, v in stage.items()} for stage in answer.stages
    ]
    if ranking is not None:
        result["layouts_tried"], result["layouts_that_fit"] = ranking.tried, len(ranking.ranked)
        result["next"] = [
            {**other.to_dict(), "reason": reason} for other, reason in ranking.reasons()
        ]
    return result


def _rows(args: argparse.Namespace) -> int:
    from aiscale.plan.rows import answers

    with open(args.rows, newline="", encoding="utf-8") as file:
        table = list(answers(csv.DictReader(file)))
    if args.json:
        print(json.dumps(table))
    else:
        writer = csv.DictWriter(
            sys.stdout, list(dict.fromkeys(key for row in table for key in row))
        )
        writer.writeheader()
        writer.writerows(table)
    return 0
