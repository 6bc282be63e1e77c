"""`aiscale plan`: how many nodes, which layout, how long, does it fit.

aiscale plan --model forge-m --machine frontier --nodes 64
aiscale plan --model gpt3-175b --machine selene --nodes 128 --layout tp=8,pp=16,micro_batch=1 --json
aiscale plan --rows runs.csv --json
aiscale plan --validate
aiscale plan --page build/planner        # sliders in a browser, which computes by itself
"""

from __future__ import annotations

import argparse
import csv
import difflib
import json
import sys
from dataclasses import fields, replace

from aiscale.config import ConfigError, HFModelConfig
from aiscale.machines import find_machine
from aiscale.plan.answer import Answer, plan
from aiscale.plan.hardware import Platform, platform_of
from aiscale.plan.layout import Layout
from aiscale.plan.report import page
from aiscale.plan.search import TUNED, Found, search
from aiscale.plan.settings import runnable
from aiscale.plan.shapes import Shape, shape_of
from aiscale.recipes import RECIPES, recipe

#: Shapes that no recipe trains, by the names people use.
SHAPES: dict[str, Shape] = {
    "gpt3-175b": Shape(layers=96, hidden=12288, heads=96, vocab=51200, tied=True, seq=2048),
    "bloom-176b": Shape(layers=70, hidden=14336, heads=112, vocab=250880, tied=True, seq=2048),
    "llama-8b": Shape(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=128256, seq=8192
    ),
    "llama-70b": Shape(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, gated=True, vocab=128256, seq=8192
    ),
    "llama-405b": Shape(
        layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, gated=True, vocab=128256, seq=8192
    ),
}  # fmt: skip
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
MOST_NODES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help=f"a recipe, or one of {', '.join(SHAPES)}")
    parser.add_argument("--machine", metavar="NAME", help="a machine of the catalogue, such as frontier")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (default: 1)")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences a step (default: the recipe's, or 2048)")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence (default: the recipe's)")
    parser.add_argument("--tokens", type=float, metavar="N", help="the budget (default: 20 a parameter)")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "tf32", "fp16", "bf16", "fp8"))
    parser.add_argument("--layout", metavar="KEY=N,...", help="this layout instead of the best, such as tp=4,pp=2")
    parser.add_argument("--rows", metavar="FILE", help="a CSV of runs, answered row by row")
    parser.add_argument("--validate", action="store_true", help="hold the formulas to every published run")
    parser.add_argument("--refit", action="store_true", help="with --validate: fit the constants anew, and store them")
    parser.add_argument("--launcher", metavar="FILE", help="write the batch file of the layout, for --machine's site")
    parser.add_argument("--page", metavar="FOLDER", help="write a web page of sliders that plans in the browser")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.refit and not args.validate:
        raise ConfigError("--refit fits the constants to the published runs: use it with --validate")
    if args.validate:
        return _validate(args)
    if args.rows:
        return _rows(args)
    for name in ("model", "machine"):
        if not getattr(args, name):
            raise ConfigError(f"--{name} is missing: try aiscale plan --model forge-m --machine frontier --nodes 64")
    shape, batch, platform = find_shape(args), batch_of(args), platform_of(find_machine(args.machine))
    if not 1 <= args.nodes <= MOST_NODES:
        raise ConfigError(f"--nodes is {args.nodes}: it must be at least 1 and at most {MOST_NODES}")
    answer, found = choose(args, shape, platform, batch)
    tokens = args.tokens or TOKENS_PER_PARAMETER * shape.parameters
    if not 0 < tokens < 1e18:
        raise ConfigError(f"--tokens is {tokens:g}: it must be greater than 0 and less than 10^18")
    if args.json:
        print(json.dumps(_json(args, answer, found, tokens)))
    else:
        print(page(answer, f"{args.model} on {args.machine}", tokens, found))
    return 0 if answer.fits else 1


def launch_plan(args: argparse.Namespace) -> tuple[tuple[str, ...], Answer]:
    """For --launcher: the settings of the best layout that aiscale can start, and its answer."""
    if args.model not in RECIPES or not args.machine:
        raise ConfigError("--launcher starts a recipe on a machine: name both with --model and --machine")
    shape, platform = find_shape(args), platform_of(find_machine(args.machine))
    answer, found = choose(args, shape, platform, batch_of(args))
    return runnable(recipe(args.model), found.ranked if found else [answer])


def choose(args: argparse.Namespace, shape: Shape, platform: Platform, batch: int) -> tuple[Answer, Found | None]:
    """The asked layout, or the best of all with the search that found it."""
    gpus = args.nodes * platform.gpus_per_node
    if args.layout:
        return plan(shape, _layout(args.layout, gpus, batch, args.precision), platform), None
    found = search(shape, platform, gpus, batch, precision=args.precision)
    return found.best, found


def find_shape(args: argparse.Namespace) -> Shape:
    if args.model in SHAPES:
        shape = SHAPES[args.model]
    elif args.model in RECIPES:
        run = recipe(args.model)
        if isinstance(run.model, HFModelConfig) and not hasattr(run.model, "n_layer"):
            raise ConfigError(f"--model {args.model} is Hugging Face's: name a recipe without -hf")
        shape = shape_of(run.model, run.loop.seq_len)
    else:
        known = [*SHAPES, *RECIPES]
        close = difflib.get_close_matches(args.model.lower(), known, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}?" if close else f"it may be one of {', '.join(known)}"
        raise ConfigError(f"unknown model {args.model!r}: {hint}")
    return replace(shape, seq=args.seq) if args.seq is not None else shape


def batch_of(args: argparse.Namespace) -> int:
    default = recipe(args.model).loop.global_batch if args.model in RECIPES else 2048
    batch = default if args.batch is None else args.batch
    if not 1 <= batch <= 10**8:
        raise ConfigError(f"--batch is {batch}: it must be at least 1 and at most 10^8 sequences")
    return batch


def _layout(text: str, gpus: int, batch: int, precision: str) -> Layout:
    """ "tp=4,pp=2,fsdp=true" as a layout of `gpus` devices; dp is what remains."""
    known = {entry.name: entry.type for entry in fields(Layout) if entry.name not in ("software", "global_batch")}
    values: dict[str, object] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.3)
            raise ConfigError(f"--layout: unknown key {key!r}: did you mean {(close or ['tp'])[0]}?")
        try:
            kind = known[key]
            values[key] = (
                value.lower() in ("true", "1") if kind == "bool" else {"int": int, "float": float}.get(kind, str)(value)
            )
        except ValueError:
            raise ConfigError(f"--layout: {key} is {value!r}: it must be a number") from None
    layout = Layout(precision=precision, global_batch=batch, software=TUNED, **values)
    others = layout.tp * layout.pp * layout.cp
    if "dp" not in values and others and gpus % others == 0:
        layout = replace(layout, dp=gpus // others)
    if layout.gpus != gpus:
        product = f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.gpus}"
        raise ConfigError(f"--layout: {product} devices, but the nodes have {gpus}: change one of them")
    schedule = "interleaved" if layout.virtual_stages > 1 and "schedule" not in values else layout.schedule
    return replace(layout, schedule=schedule)


def _json(args: argparse.Namespace, answer: Answer, found: Found | None, tokens: float) -> dict:
    result = {"model": args.model, "machine": args.machine, "nodes": args.nodes, **answer.to_dict()}
    result |= {"tokens": tokens, "days": answer.days(tokens), "node_hours": answer.node_hours(tokens)}
    result["stages_GB"] = [{k: round(v / 1e9, 3) for k, v in stage.items()} for stage in answer.stages]
    if found is not None:
        result["layouts_tried"], result["layouts_that_fit"] = found.tried, len(found.ranked)
        result["next"] = [{**other.to_dict(), "reason": reason} for other, reason in found.reasons()]
    return result


def _rows(args: argparse.Namespace) -> int:
    from aiscale.plan.rows import answers

    try:
        with open(args.rows, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--rows {args.rows} cannot be read: {error}") from None
    found = list(answers(rows))
    if args.json:
        print(json.dumps(found))
    else:
        writer = csv.DictWriter(sys.stdout, list(dict.fromkeys(key for row in found for key in row)))
        writer.writeheader()
        writer.writerows(found)
    return 0


def _validate(args: argparse.Namespace) -> int:
    from aiscale.plan import fit, validate

    if args.refit:
        text = fit.written(*fit.fit_all())
        fit.FILE.write_text(text, encoding="utf-8")
        print("constants.toml is written; run aiscale plan --validate for its scoreboard", file=sys.stderr)
        return 0
    left_out, whole, halves = validate.scoreboard(), validate.scoreboard(left_out=False), validate.halves()
    if args.json:
        boards = {"left_out": left_out, "one_model_left_out": halves, "fitted_on_all": whole}
        boards = {name: validate.as_json(rows) for name, rows in boards.items()}
        print(json.dumps(boards, indent=1))
        return 0
    print("constants fitted without the source that they are held to\n" + validate.page(left_out))
    print("\none model of the large sweep left out, the other kept\n" + validate.page(halves))
    print("\nconstants as shipped, fitted on all sources\n" + validate.page(whole))
    print(f"\n{validate.NOTE}")
    return 0
