"""Stage 2: the operations of cpu.py on a GPU. Same names, same arguments, but arrays that live in the GPU's memory.

    python -m from_scratch.train --device gpu                               # trains on a GPU
    NUMBA_ENABLE_CUDASIM=1 python -m from_scratch.train tiny --device gpu   # simulates one, thread by thread

Graph, layers and training loop stay as they are, because they never look into an array. Parameters, gradients and
Adam's moments stay on the GPU. What crosses to the host and back goes through to_device and to_host: they count it.
"""

import math
import os
import sys

import numpy as np

try:
    from numba import config, cuda
except ImportError:
    sys.exit("stage 2 needs numba, which is not installed: pip install 'numba>=0.61'")
if not cuda.is_available():
    sys.exit("numba finds no GPU (with one, install numba-cuda[cu13]): NUMBA_ENABLE_CUDASIM=1 in front simulates it")

from . import cuda_kernels as kernels
from .cuda_kernels import THREADS, TILE

NUMBER_BYTES = 4
moved_bytes = {"to the GPU": 0, "to the host": 0}
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")  # the rank's number on its machine
cuda.select_device(int(next((os.environ[name] for name in LOCAL_RANK if name in os.environ), 0)) % len(cuda.gpus))
if config.ENABLE_CUDASIM:
    sys.setswitchinterval(1e-4)  # seconds: the threads of the simulator spend their time waiting for each other


def to_device(array):
    moved_bytes["to the GPU"] += array.nbytes
    return cuda.to_device(np.ascontiguousarray(array))


def to_host(x):
    moved_bytes["to the host"] += x.nbytes
    return x.copy_to_host()


def empty(*shape):
    return cuda.device_array(shape, np.float32)


def zeros(*shape):
    x = empty(*shape)
    by_number(kernels.fill, flat(x), np.float32(0))
    return x


def flat(x):
    return x.reshape(x.size)


def rows(x):
    """[.., C] -> [R, C]"""
    *_, columns = x.shape
    return x.reshape(x.size // columns, columns)


def stack(x):
    """[.., R, C] -> [n, R, C]"""
    *_, n_rows, columns = x.shape
    return x.reshape(x.size // (n_rows * columns), n_rows, columns)


def by_number(kernel, *arguments):
    """Start a kernel with a thread for each number of its largest array. In the simulator a few take turns."""
    largest = max(x.size for x in arguments if hasattr(x, "size"))
    blocks = 1 if config.ENABLE_CUDASIM else math.ceil(largest / THREADS)
    kernel[blocks, THREADS](*arguments)


def by_row(kernel, x, *arguments):
    """Start a kernel with a block for each row of x, and a shared number for each thread of a block."""
    kernel[x.shape[0], THREADS, 0, NUMBER_BYTES * THREADS](x, *arguments)


def by_tile(kernel, blocks, *arguments, tiles):
    """Start a kernel with blocks of TILE x TILE threads, which share the numbers of so many tiles."""
    kernel[blocks, (TILE, TILE), 0, NUMBER_BYTES * TILE * TILE * tiles](*arguments)


def reshape(x, shape):
    return x.reshape(*shape)


def transpose(x, axes):
    """A copy: the kernels want neighbours in a row to be neighbours in memory."""
    shape = tuple(x.shape[axis] for axis in axes)
    strides = tuple(x.strides[axis] // x.dtype.itemsize for axis in axes)
    y = empty(*shape)
    by_number(kernels.transpose, flat(x), flat(y), shape, strides)
    return y


def turned(x):
    """The last two dims of x exchanged."""
    n = len(x.shape)
    return transpose(x, (*range(n - 2), n - 1, n - 2))


def sum_leading(x, shape):
    """The sum over the leading dims of x that this shape lacks."""
    y = empty(*shape)
    by_tile(kernels.sum_rows, math.ceil(y.size / TILE), x.reshape(x.size // y.size, y.size), flat(y), tiles=1)
    return y


def add(a, b):
    c = empty(*a.shape)
    by_number(kernels.add, flat(a), flat(b), flat(c))
    return c


def add_backward(dc, a, b):
    return dc, dc if a.shape == b.shape else sum_leading(dc, b.shape)


def matmul(a, b):
    """[.., R, K] [.., K, C] -> [.., R, C]. A weight b is [K, C]: then all rows of a are one matrix."""
    left, right = stack(a if len(b.shape) > 2 else rows(a)), stack(b)
    n, n_rows, columns = left.shape[0], left.shape[1], right.shape[2]
    c = empty(n, n_rows, columns)
    by_tile(kernels.matmul, (math.ceil(columns / TILE), math.ceil(n_rows / TILE), n), left, right, c, tiles=2)
    return c.reshape(*a.shape[:-1], columns)


def matmul_backward(dc, a, b):
    """da = dc b^T, db = a^T dc"""
    da = matmul(dc, turned(b))
    return da, matmul(turned(a), dc) if len(b.shape) > 2 else matmul(turned(rows(a)), rows(dc))


def gelu(x):
    y = empty(*x.shape)
    by_number(kernels.gelu, flat(x), flat(y))
    return y


def gelu_backward(dy, x):
    dx = empty(*x.shape)
    by_number(kernels.gelu_backward, flat(dy), flat(x), flat(dx))
    return dx


def gather(table, indices):
    width = table.shape[1]
    y = empty(*indices.shape, width)
    by_number(kernels.gather, flat(table), flat(indices), flat(y), width)
    return y


def gather_backward(dy, table, indices):
    dtable = zeros(*table.shape)
    by_number(kernels.scatter_add, flat(dy), flat(indices), flat(dtable), table.shape[1])
    return dtable


def causal_softmax(x, scale):
    y = empty(*x.shape)
    by_row(kernels.causal_softmax, rows(x), rows(y), np.float32(scale))
    return y


def causal_softmax_backward(dy, y, scale):
    dx = empty(*y.shape)
    by_row(kernels.causal_softmax_backward, rows(dy), rows(y), rows(dx), np.float32(scale))
    return dx


def layer_norm(x, gain, bias):
    y, normed, rstd = empty(*x.shape), empty(*x.shape), empty(*x.shape[:-1])
    by_row(kernels.layer_norm, rows(x), gain, bias, rows(y), rows(normed), flat(rstd))
    return y, normed, rstd


def layer_norm_backward(dy, gain, normed, rstd):
    dx, dgain = empty(*dy.shape), empty(*dy.shape)
    by_row(kernels.layer_norm_backward, rows(dy), gain, rows(normed), flat(rstd), rows(dx), rows(dgain))
    return dx, sum_leading(dgain, gain.shape), sum_leading(dy, gain.shape)


def cross_entropy(logits, targets):
    probabilities, losses = empty(*logits.shape), empty(targets.size)
    by_row(kernels.cross_entropy, rows(logits), flat(targets), losses, rows(probabilities))
    return sum_leading(losses, (1,)), probabilities


def cross_entropy_backward(probabilities, targets):
    dlogits = empty(*probabilities.shape)
    classes = dlogits.size // targets.size
    by_number(kernels.cross_entropy_backward, flat(probabilities), flat(targets), flat(dlogits), classes)
    return dlogits


def adam(w, dw, m, v, *settings):
    by_number(kernels.adam, flat(w), flat(dw), flat(m), flat(v), *np.float32(settings))
