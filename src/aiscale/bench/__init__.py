"""Benchmarks: our code and other libraries on this machine, measured side by side.

    aiscale bench model             # training and generation against transformers' GPT-2, with a floor
    aiscale bench radius            # Radius against dense and its competitors, on a slow link
    from aiscale.bench.timing import paired                                           # for a benchmark of your own
    timing = paired({"a": step_a, "b": step_b}, rounds=10); timing.ratio("b", "a")

`command` imports each benchmark by name: one of them takes seconds to load transformers, and the others need not wait.
"""
