"""The result of bench.model as tables: `show_model(bench_model())`."""

from __future__ import annotations

from aiscale.bench.tables import checks_table, heading, table


def show_model(result: dict) -> None:
    heading(result)
    for row in result["training"]:
        _show_training(row)
    for row in result["generation"]:
        _show_generation(row)
    if result.get("kernels"):
        _show_kernels(result["kernels"])
    checks_table(result["checks"])


def _show_training(row: dict) -> None:
    title = f"training {row['size']}: {row['parameters'] / 1e6:.1f} M parameters, vocabulary {row['vocab_size']}, "
    title += f"{row['batch']} x {row['seq_len']} tokens a step, median of {row['rounds']} rounds"
    rows = []
    for name, seconds in row["seconds"].items():
        memory = row["peak_memory_bytes"].get(name)
        peak = f"{memory / 2**20:,.0f} MiB" if memory else ""
        rows.append((name, f"{row['tokens_per_s'][name]:,.0f}", f"{seconds:.3f}", *_relative(row, name), peak))
    table(title, ("", "tokens/s", "s/step", "time / ours", "range over rounds", "peak memory"), rows)


def _show_generation(row: dict) -> None:
    title = f"generation {row['size']}: {row['new_tokens']} tokens, greedy, one text, vocabulary {row['vocab_size']}, "
    title += f"median of {row['rounds']} rounds; the two texts {'are the same' if row['same_text'] else 'DIFFER'}"
    rows = []
    for name, seconds in row["seconds"].items():
        per_token = f"{1e3 * seconds / row['new_tokens']:.2f}"
        rows.append((name, f"{row['tokens_per_s'][name]:,.0f}", per_token, *_relative(row, name)))
    table(title, ("", "tokens/s", "ms/token", "time / ours", "range over rounds"), rows)


def _show_kernels(kernels: list[dict]) -> None:
    rows = []
    for row in kernels:
        spread = f"{min(row['of_each_round']):.2f} to {max(row['of_each_round']):.2f}"
        rows.append((f"{row['what']} {row['size']}", row["kernel"], f"{row['time_without']:.3f}", spread))
    table("our kernels", ("", "kernel", "time without / with", "range over rounds"), rows)


def _relative(row: dict, name: str) -> tuple[str, str]:
    if name == "ours":
        return "1", ""
    ratios = row["speedup_of_each_round"][name]
    return f"{row['speedup'][name]:.3f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
