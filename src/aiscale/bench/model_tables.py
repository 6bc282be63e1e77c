"""The result of bench.model as tables: `show_model(bench_model())`."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def show_model(result: dict) -> None:
    """Print what bench_model returned."""
    # A pipe has no width: a table cut to 80 columns would break its numbers.
    console, machine = Console(width=None if sys.stdout.isatty() else 120), result["machine"]
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}, python {machine['python']}"
    console.print(
        f"{machine['date']}  {machine['command']}\n{machine['processor']}, {machine['threads']} threads of", end=" "
    )
    console.print(f"{machine['cores']} cores, load {machine['load_average']} at the start; {versions}")
    disturbed = max(row["disturbed"] for row in result["training"] + result["generation"])
    if disturbed > 0.1:
        console.print(f"[yellow]other programs disturbed up to {disturbed:.0%} of the measurements: the ratios scatter")
    for row in result["training"]:
        console.print(_training_table(row))
    for row in result["generation"]:
        console.print(_generation_table(row))
    console.print(_kernels_table(result["kernels"]))
    if result["checks"]:
        console.print(_checks_table(result["checks"]))


def _training_table(row: dict) -> Table:
    title = f"training {row['size']}: {row['parameters'] / 1e6:.1f} M parameters, vocabulary {row['vocab_size']}, "
    title += f"{row['batch']} x {row['seq_len']} tokens a step, median of {row['rounds']} rounds"
    table = Table(
        "", "tokens/s", "s/step", "time / ours", "range over rounds", "peak memory", title=title, title_justify="left"
    )
    for name, seconds in row["seconds"].items():
        memory = row["peak_memory_bytes"].get(name)
        table.add_row(
            name,
            f"{row['tokens_per_s'][name]:,.0f}",
            f"{seconds:.3f}",
            *_relative(row, name),
            f"{memory / 2**20:,.0f} MiB" if memory else "",
        )
    return table


def _generation_table(row: dict) -> Table:
    title = f"generation {row['size']}: {row['new_tokens']} tokens, greedy, one text, vocabulary {row['vocab_size']}, "
    title += f"median of {row['rounds']} rounds; the two texts {'are the same' if row['same_text'] else 'DIFFER'}"
    table = Table("", "tokens/s", "ms/token", "time / ours", "range over rounds", title=title, title_justify="left")
    for name, seconds in row["seconds"].items():
        per_token = f"{1e3 * seconds / row['new_tokens']:.2f}"
        table.add_row(name, f"{row['tokens_per_s'][name]:,.0f}", per_token, *_relative(row, name))
    return table


def _kernels_table(rows: list[dict]) -> Table:
    table = Table("", "kernel", "time without / with", "range over rounds", title="our kernels", title_justify="left")
    for row in rows:
        ratios = row["of_each_round"]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        table.add_row(f"{row['what']} {row['size']}", row["kernel"], f"{row['time_without']:.3f}", spread)
    return table


def _relative(row: dict, name: str) -> tuple[str, str]:
    if name == "ours":
        return "1", ""
    ratios = row["speedup_of_each_round"][name]
    return f"{row['speedup'][name]:.3f}", f"{min(ratios):.2f} to {max(ratios):.2f}"


def _checks_table(found: list[dict]) -> Table:
    table = Table("promise", "measured", "target", "")
    for check in found:
        target = f"{'at most' if check['at_most'] else 'at least'} {check['target']}"
        table.add_row(check["name"], f"{check['value']:.3f}", target, "[green]met" if check["met"] else "[red]missed")
    return table
