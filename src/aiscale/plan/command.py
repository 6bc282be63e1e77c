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
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import get_type_hints

from aiscale.config import ConfigError, Run, hint
from aiscale.config.run import as_type
from aiscale.machines import find_machine
from aiscale.plan.answer import Answer, plan
from aiscale.plan.hardware import Platform, platform_of
from aiscale.plan.layout import SHAPES, Layout, Shape, shape_of
from aiscale.plan.memory import CATEGORIES
from aiscale.plan.search import TUNED, Found, search
from aiscale.recipes import RECIPES, recipe

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
    parser.add_argument(
        "--launcher",
        metavar="FILE",
        help="write the layout's batch file, for the site of --machine (frontier, perlmutter, lumi-g)",
    )
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
    tokens = TOKENS_PER_PARAMETER * shape.parameters if args.tokens is None else args.tokens
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
        shape = shape_of(run.model, run.loop.seq_len)
    else:
        known = [*SHAPES, *RECIPES]
        raise ConfigError(f"unknown model {args.model!r}: {hint(args.model.lower(), known)}")
    return replace(shape, seq=args.seq) if args.seq is not None else shape


def batch_of(args: argparse.Namespace) -> int:
    default = recipe(args.model).loop.global_batch if args.model in RECIPES else 2048
    batch = default if args.batch is None else args.batch
    if not 1 <= batch <= 10**8:
        raise ConfigError(f"--batch is {batch}: it must be at least 1 and at most 10^8 sequences")
    return batch


def _layout(text: str, gpus: int, batch: int, precision: str) -> Layout:
    """ "tp=4,pp=2,fsdp=true" as a layout of `gpus` devices; dp is what remains."""
    known = get_type_hints(Layout)
    elsewhere = {"precision": "--precision", "global_batch": "--batch"}
    for key in ("software", *elsewhere):
        del known[key]
    values: dict[str, object] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key in elsewhere:
            raise ConfigError(f"--layout: {key} is no part of a layout: set it with {elsewhere[key]}")
        if key not in known:
            raise ConfigError(f"--layout: unknown key {key!r}: {hint(key, known)}")
        values[key] = as_type(known[key], value, f"--layout: {key}")
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
    from aiscale.plan import validate

    if args.refit:
        text = validate.written(*validate.fit_all())
        validate.FILE.write_text(text, encoding="utf-8")
        print("constants.toml is written; run aiscale plan --validate for its scoreboard", file=sys.stderr)
        return 0
    left_out, whole, halves = validate.scoreboard(), validate.scoreboard(left_out=False), validate.halves()
    if args.json:
        boards = {"left_out": left_out, "one_model_left_out": halves, "fitted_on_all": whole}
        boards = {name: [asdict(row) for row in rows] for name, rows in boards.items()}
        print(json.dumps(boards, indent=1))
        return 0
    print("constants fitted without the source that they are held to\n" + validate.page(left_out))
    print("\none model of the large sweep left out, the other kept\n" + validate.page(halves))
    print("\nconstants as shipped, fitted on all sources\n" + validate.page(whole))
    print(f"\n{validate.NOTE}")
    return 0


# A layout that aiscale can start ----------------------------------------------------------------------------------


def settings_of(layout: Layout) -> tuple[str, ...]:
    """Raises ConfigError for what no strategy of aiscale has: context parallelism, offload beside a pipeline."""
    if layout.cp > 1 or layout.offload:
        raise ConfigError(f"{layout.name()}: aiscale trains without cp and, beside tp and pp, without offload")
    common = (
        f"parallel.dp={layout.dp}",
        f"loop.micro_batch={layout.micro_batch}",
        f"loop.global_batch={layout.global_batch}",
        f"loop.precision={layout.precision}",
        f"model.activation_checkpointing={str(layout.recompute == 'full').lower()}",
    )
    if layout.fsdp:
        return ("parallel.strategy=fsdp", *common)
    if layout.tp * layout.pp * layout.ep == 1:
        return ("parallel.strategy=zero", f"parallel.zero_stage={layout.zero_stage}", *common)
    options = {name: getattr(layout, name) for name in ("tp", "pp", "ep", "virtual_stages", "schedule")}
    options["sequence_parallel"] = str(layout.sequence_parallel).lower()
    options["distributed_optimizer"] = str(layout.zero_stage == 1).lower()
    return ("parallel.strategy=megatron", *(f"parallel.{name}={value}" for name, value in options.items()), *common)


def runnable(run: Run, answers: Iterable[Answer]) -> tuple[tuple[str, ...], Answer]:
    """The settings of the first of these layouts that this run accepts."""
    why = "no layout fits"
    for answer in answers:
        try:
            settings = settings_of(answer.layout)
            run.override(*settings).check_world(answer.layout.gpus)
        except ConfigError as error:
            why = str(error)
        else:
            return settings, answer
    raise ConfigError(f"no layout that fits can be started by aiscale; of the last: {why}")


# The page ---------------------------------------------------------------------------------------------------------


def page(answer: Answer, title: str, tokens: float, found: Found | None = None) -> str:
    shape, layout, step = answer.shape, answer.layout, answer.step
    lines = [
        f"{title}: {shape.parameters / 1e9:.3g} B parameters, {shape.layers} layers of {shape.hidden}, "
        f"sequences of {shape.seq}, {layout.global_batch} a step",
        f"on {answer.nodes:g} node{'s' * (answer.nodes != 1)}, {layout.gpus} x {answer.platform.name}",
        "",
        f"layout     {layout.name()}",
        f"step       {step.total_s:.3g} s, {answer.tokens_per_s:,.0f} tokens/s a device, "
        f"{answer.tokens_per_s * layout.gpus:,.0f} in all",
        f"rate       {answer.tflops:.4g} TFLOP/s a device, MFU {100 * answer.mfu:.1f} %, HFU {100 * answer.hfu:.1f} %"
        + ("; the host's launches set the pace" if step.launch_bound else ""),
        f"memory     {answer.memory_gb:.1f} of {answer.capacity_gb:.1f} GB"
        + ("" if answer.fits else f": {answer.memory_gb - answer.capacity_gb:.1f} GB too much"),
        f"{tokens / 1e9:,.3g} B tokens: {answer.days(tokens):,.3g} days, {answer.node_hours(tokens):,.0f} node-hours",
        "",
        *_seconds(answer),
        "",
        *_memory(answer),
    ]
    if found is not None:
        lines += ["", *_others(found)]
    return "\n".join(lines)


def _seconds(answer: Answer) -> list[str]:
    step = answer.step
    parts = {
        "computation": step.compute_s - step.recompute_s,
        "recomputation": step.recompute_s,
        "bubble": step.bubble_s,
        **step.parts,
        "optimizer, fixed": step.optimizer_s,
    }
    lines = ["where the step goes"]
    for name, seconds in parts.items():
        share = seconds / step.total_s
        if share >= 0.0005:
            lines.append(f"  {name:24}{seconds:10.4g} s {100 * share:5.1f} %  {'#' * round(40 * share)}")
    return lines


def _memory(answer: Answer) -> list[str]:
    stages = answer.stages
    shown = sorted({0, max(range(len(stages)), key=lambda i: sum(stages[i].values())), len(stages) - 1})
    lines = ["GB by stage" + " " * 13 + "".join(f"{f'stage {i}':>10}" for i in shown)]
    for category in CATEGORIES:
        cells = [stages[i][category] / 1e9 for i in shown]
        if max(cells) >= 0.05:
            lines.append(f"  {category:22}" + "".join(f"{cell:10.1f}" for cell in cells))
    return lines


def _others(found: Found) -> list[str]:
    lines = [f"{found.tried} layouts: {len(found.ranked)} fit, {len(found.too_large)} do not"]
    for answer, reason in found.reasons():
        lines.append(f"  {answer.layout.name():62} {answer.step.total_s:8.3g} s  {reason}")
    for over, layout in found.too_large[:3]:
        lines.append(f"  {layout.name():62} does not fit: {over:.1f} GB too much")
    return lines
