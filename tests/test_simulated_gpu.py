"""The memory in which simulated GPU kernels work counts what they read, write and carry."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba", reason="numba is not installed: make setup")

FOLDER = Path(__file__).parents[1] / "notebooks/appendix"
sys.path.append(str(FOLDER))

import gpu  # noqa: E402
from gpu import bus, compiled, cuda, empty, record, to_gpu  # noqa: E402


@cuda.jit
def double(x, y):
    i = cuda.grid(1)
    if i < x.shape[0]:
        y[i] = 2 * x[i]


@cuda.jit
def every_third(x, y):
    i = cuda.grid(1)
    y[i] = x[3 * i]


def test_accesses_are_counted_and_every_copy_is_on_the_bus():
    bus.reset()
    x, y = to_gpu(np.arange(100, dtype=np.float32)), empty(100)
    double[4, 32](x, y)
    assert np.array_equal(y.to_host(), 2 * np.arange(100))
    assert (x.reads, x.writes, y.reads, y.writes) == (100, 0, 0, 100)
    assert bus.bytes == 800


@pytest.mark.parametrize(("kernel", "of_x"), [(double, 8), (every_third, 24)])
def test_a_warp_takes_as_many_transactions_as_it_touches_pieces_of_32_bytes(kernel, of_x):
    x, y = to_gpu(np.ones(200, np.float32)), empty(64)
    kernel[2, 32](x, y)
    assert (x.transactions, y.transactions) == (of_x, 8)


PROGRAM = (
    "x, y = np.ones(10, np.float32), np.zeros(10, np.float32)\n"
    "double[1, size](x, y)\nresult = y.tolist()"
)


def test_the_same_kernel_runs_in_a_process_of_its_own_and_its_failure_is_one_line():
    assert compiled([double], PROGRAM, simulate=True, size=10) == [2.0] * 10
    with pytest.raises(
        gpu.GpuError, match="^the kernels did not run on the GPU.*: ValueError: no such thing$"
    ) as raised:
        compiled([], "raise ValueError('no such thing')", simulate=True)
    assert raised.value._render_traceback_() == [f"GpuError: {raised.value}"]


def test_record_notes_what_each_kernel_did_once_and_may_be_called_again():
    def start(kernel, *arguments):
        kernel[4, 32](*arguments)

    stage2 = SimpleNamespace(by_number=start, by_row=start, by_tile=start)
    record(stage2)
    counted = record(stage2)
    counted.phase = "forward"
    x = stage2.to_device(np.ones((10, 10), np.float32)).reshape(100)
    stage2.by_row(double, x, stage2.empty(100))
    stage2.by_number(double, x, x)
    assert counted.launches == [("forward", "double", 100, 100, 800)] * 2
    assert np.array_equal(stage2.to_host(x), np.full(100, 2))
