"""workshop/from_scratch on a simulated GPU: kernels compute what NumPy does, stages learn alike."""

import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest

numba = pytest.importorskip("numba", reason="numba is not installed: make setup")
numba.config.ENABLE_CUDASIM = True  # read when numba.cuda is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "workshop"))

from from_scratch import cpu, gpu  # noqa: E402
from from_scratch import cuda_kernels as kernels  # noqa: E402

from test_from_scratch import losses, run  # noqa: E402

random = np.random.default_rng(0)
WORDS = np.array([[0, 4, 1], [2, 4, 4]])


def matmul(on, a, b, dc):
    return on.matmul(a, b), *on.matmul_backward(dc, a, b)


def adam(on, w, dw):
    m, v = on.zeros(*w.shape), on.zeros(*w.shape)
    for _ in range(2):
        on.adam(w, dw, m, v, 0.01, 0.9, 0.999, 1e-4)
    return w, m, v


#: name -> shapes of its arrays, or words; the operation, forward and backward, on the module `on`.
#: Rows are longer than a block has threads, and no tile divides a matrix.
OPERATIONS = {
    "add": (
        [(2, 5, 6), (6,), (2, 5, 6)],
        lambda on, a, b, dc: (on.add(a, b), *on.add_backward(dc, a, b)),
    ),
    "matmul": ([(2, 5, 6), (6, 7), (2, 5, 7)], matmul),
    "matmul of stacks": ([(2, 2, 3, 6), (2, 2, 6, 5), (2, 2, 3, 5)], matmul),
    "transpose": (
        [(2, 3, 4, 5)],
        lambda on, x: [on.transpose(x, axes) for axes in ((0, 2, 1, 3), (1, 3, 0, 2))],
    ),
    "gather": (
        [(5, 6), WORDS, (2, 3, 6)],
        lambda on, t, i, dy: (on.gather(t, i), on.gather_backward(dy, t, i)),
    ),
    "gelu": ([(3, 7), (3, 7)], lambda on, x, dy: (on.gelu(x), on.gelu_backward(dy, x))),
    "layer_norm": (
        [(2, 3, 6), (6,), (6,), (2, 3, 6)],
        lambda on, x, g, b, dy: (
            *(kept := on.layer_norm(x, g, b))[:2],
            *on.layer_norm_backward(dy, g, *kept[1:]),
        ),
    ),
    "causal_softmax": (
        [(2, 6, 6)] * 2,
        lambda on, x, dy: (y := on.causal_softmax(x, 2), on.causal_softmax_backward(dy, y, 2)),
    ),
    "cross_entropy": (
        [(2, 3, 6), WORDS],
        lambda on, x, i: (*(y := on.cross_entropy(x, i)), on.cross_entropy_backward(y[1], i)),
    ),
    "adam": ([(3, 7), (3, 7)], adam),
}
#: operation, kernel on its way back, what stands there, and a mistake
FAULTS = [
    ("add", "sum_rows", "range(1, TILE)", "range(2, TILE)"),
    ("matmul", "matmul", "and start + x < a.shape[2]", "and start + x < TILE"),
    ("matmul of stacks", "matmul", "b[n, start + y, column] if", "b[0, start + y, column] if"),
    ("transpose", "transpose", "rest //= shape[dim]", "rest //= shape[0]"),
    ("gather", "scatter_add", "indices[i // width]", "indices[0]"),
    ("gelu", "gelu_backward", "(ONE - tanh * tanh)", "(ONE - tanh)"),
    ("layer_norm", "layer_norm_backward", " - along_ones", ""),
    ("causal_softmax", "causal_softmax_backward", "(dy[row, j] - total)", "dy[row, j]"),
    ("cross_entropy", "cross_entropy_backward", " - wanted", ""),
    ("adam", "adam", "(ONE - beta1) * dw[i]", "dw[i]"),
]


def assert_right(name):
    inputs, operation = OPERATIONS[name]
    arrays = [x if x is WORDS else random.standard_normal(x).astype(np.float32) for x in inputs]
    on_gpu = map(gpu.to_host, operation(gpu, *map(gpu.to_device, arrays)))
    for simulated, expected in zip(on_gpu, operation(cpu, *arrays), strict=True):
        np.testing.assert_allclose(simulated, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_computes_what_numpy_does(name):
    assert_right(name)


@pytest.mark.parametrize(
    ("name", "kernel", "right", "wrong"), FAULTS, ids=[fault[0] for fault in FAULTS]
)
def test_a_wrong_kernel_is_noticed(name, kernel, right, wrong, monkeypatch):
    source = inspect.getsource(getattr(kernels, kernel).py_func)
    assert right in source
    names = dict(vars(kernels))
    exec(source.replace(right, wrong), names)
    monkeypatch.setattr(kernels, kernel, names[kernel])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_right(name)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_a_gpu_learns_what_numpy_does_and_its_transfers_are_counted(ranks, monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    output = run("tiny", "--steps", 2, "--device", "gpu", ranks=ranks)
    np.testing.assert_allclose(losses(output), losses(run("tiny", "--steps", 2)), rtol=0, atol=1e-5)
    weights, words = 4 * 1464, 8 * (2 * 8 // max(ranks, 1) + 4)
    # what rank 0 broadcasts, and the gradients of two steps
    through_host = 3 * weights if ranks else 0
    moved = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", output)]
    assert moved == [weights + 2 * words + through_host, 4 * 2 + through_host]


#: nccl4py's names as nccl_sums.py calls them; NCCL itself needs GPUs, so MPI sums on the host
STAND_IN = """
from contextlib import nullcontext as group
from mpi4py import MPI

AVG, WORLD = "average", MPI.COMM_WORLD


def get_unique_id():
    assert WORLD.rank == 0
    return 57


class Communicator:
    @classmethod
    def init(cls, nranks, rank, unique_id):
        assert (nranks, rank, unique_id) == (WORLD.size, WORLD.rank, 57)
        return cls()

    def allreduce(self, sendbuf, recvbuf, op):
        assert sendbuf is recvbuf and op is AVG
        host = sendbuf.copy_to_host()
        WORLD.Allreduce(MPI.IN_PLACE, host)
        recvbuf.copy_to_device(host / WORLD.size)
"""


def test_gradients_that_nccl_adds_up_do_not_cross_to_the_host(tmp_path, monkeypatch):
    (tmp_path / "nccl").mkdir()
    (tmp_path / "nccl/core.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    output = run("tiny", "--steps", 2, "--device", "gpu", "--sums", "nccl", ranks=2)
    np.testing.assert_allclose(losses(output), losses(run("tiny", "--steps", 2)), rtol=0, atol=1e-5)
    weights, words = 4 * 1464, 8 * (8 + 4)
    moved = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", output)]
    assert moved == [2 * weights + 2 * words, 4 * 2 + weights], "rank 0's first weights, and words"
