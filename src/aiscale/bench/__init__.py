"""Benchmarks: what this machine does with our code and with others', measured side by side.

aiscale bench model             # training and generation against transformers' GPT-2, with a floor
result = bench_model()          # the same as a dictionary; show_model(result) prints it
timing = paired({"a": step_a, "b": step_b}, rounds=10); timing.ratio("b", "a")    # for a benchmark of your own
"""

from aiscale.bench.model import bench_model
from aiscale.bench.model_tables import show_model
from aiscale.bench.timing import Paired, machine_facts, paired, peak_memory_bytes

__all__ = ["Paired", "bench_model", "machine_facts", "paired", "peak_memory_bytes", "show_model"]
