"""Benchmarks: what this machine does with our code and with others', measured side by side.

    aiscale bench model             # training and generation against transformers' GPT-2, with a floor
    aiscale bench radius            # Radius against dense and its competitors, on a slow link
    timing = paired({"a": step_a, "b": step_b}, rounds=10); timing.ratio("b", "a")    # for a benchmark of your own

Each benchmark is a module that is imported by name (`command`): one of them takes seconds to load transformers, which
the ranks of the others need not wait for.
"""

from aiscale.bench.timing import Paired, machine_facts, paired, peak_memory_bytes

__all__ = ["Paired", "machine_facts", "paired", "peak_memory_bytes"]
