"""Benchmarks: our code and other libraries on this machine, measured side by side.

    aiscale bench model             # training and generation against transformers' GPT-2, with a floor
    aiscale bench radius            # Radius against dense and its competitors, on a slow link
    timing = paired({"a": step_a, "b": step_b}, rounds=10); timing.ratio("b", "a")    # your own benchmark

`command` imports each benchmark by name: one of them takes seconds to load transformers, and the others need not wait.
"""

from aiscale.bench.timing import Paired, machine_facts, paired
