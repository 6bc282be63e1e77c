"""GPU kernels on any machine: Numba's simulator, and a memory that counts how kernels use it.

    from gpu import bus, cuda, empty, to_gpu

    @cuda.jit
    def double(x, y):
        i = cuda.grid(1)
        if i < x.shape[0]:
            y[i] = 2 * x[i]

    x, y = to_gpu(np.ones(100, np.float32)), empty(100)
    double[4, 32](x, y)                            # 4 blocks of 32 threads
    y.to_host()                                    # 100 times 2.0
    x.reads, y.writes, x.transactions, bus.bytes   # 100, 100, 13, 800

The simulator runs every thread of a block as a thread of Python, barriers included: slow, but the counts are exact.
They are those of a GPU without caches. `record` counts the kernels of workshop/from_scratch in the same way, and
`compiled` runs kernels on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from aiscale.lesson.notebook import LessonError


class GpuError(LessonError):
    """Numba is missing, or did not compile; a notebook shows the one line, without a traceback."""


try:
    from numba import config

    if "numba.cuda" in sys.modules and not config.ENABLE_CUDASIM:
        raise GpuError("numba.cuda is loaded without its simulator: restart the kernel, and import gpu first")
    config.ENABLE_CUDASIM = True  # read when numba.cuda is imported: a process has the simulator or the compiler
    from numba import cuda, float32
except ImportError:
    raise GpuError(
        "kernels need numba, which is not installed: run %pip install 'numba>=0.61' in a cell, then restart the kernel"
    ) from None

__all__ = ["Memory", "bus", "compiled", "cuda", "empty", "float32", "record", "to_gpu"]
WARP_THREADS = 32
#: A warp's reads take as many transactions as it touches pieces of this size: CUDA C++ Best Practices Guide, 10.2.1.
TRANSACTION_BYTES = 32


@dataclass
class Bus:
    """What went between the host's memory and the GPU's, either way."""

    bytes: int = 0

    def carry(self, array: np.ndarray) -> np.ndarray:
        self.bytes += array.nbytes
        return array.copy()

    def reset(self) -> None:
        self.bytes = 0


bus = Bus()


@dataclass
class Memory:
    """An array in the GPU's global memory: kernels read and write it by index, and every access is recorded."""

    array: np.ndarray
    accesses: list[tuple] = field(default_factory=list)  #: (written, block, thread of the block, position)

    def __getitem__(self, index: int | tuple[int, ...]) -> np.generic:
        self._record(False, index)
        return self.array[index]

    def __setitem__(self, index: int | tuple[int, ...], value: float) -> None:
        self._record(True, index)
        self.array[index] = value

    def _record(self, written: bool, index: int | tuple[int, ...]) -> None:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.array.ndim or not all(0 <= i < n for i, n in zip(index, self.array.shape, strict=True)):
            raise IndexError(f"index {tuple(map(int, index))} is outside of an array of shape {self.array.shape}")
        position = sum(int(i) * stride for i, stride in zip(index, self.array.strides, strict=True))
        thread = threading.current_thread()  # the simulator's, which knows its place in the grid
        self.accesses.append((written, tuple(thread.blockIdx), thread.thread_id, position // self.array.itemsize))

    def __getattr__(self, name: str) -> object:
        if name not in ("shape", "size", "strides", "dtype", "nbytes"):
            raise AttributeError(f"a kernel cannot ask an array for its {name}")
        return getattr(self.array, name)

    @property
    def reads(self) -> int:
        return sum(not written for written, *_ in self.accesses)

    @property
    def writes(self) -> int:
        return sum(written for written, *_ in self.accesses)

    @property
    def transactions(self) -> int:
        """Pieces of 32 bytes that go between this array and the GPU's processors, without caches.

        The threads of a warp run in step: the k-th read of each belongs to one instruction, and so does the k-th write.
        """
        turn, touched = Counter(), set()
        for written, block, thread, position in self.accesses:
            turn[written, block, thread] += 1
            piece = position * self.array.itemsize // TRANSACTION_BYTES
            touched.add((written, block, thread // WARP_THREADS, turn[written, block, thread], piece))
        return len(touched)

    def reshape(self, *shape: int) -> Memory:
        return Memory(self.array.reshape(*shape), self.accesses)

    def to_host(self) -> np.ndarray:
        return bus.carry(self.array)


def to_gpu(array: np.ndarray) -> Memory:
    """A copy of `array` in the GPU's memory; the bus counts it."""
    return Memory(bus.carry(np.ascontiguousarray(array)))


def empty(*shape: int) -> Memory:
    """Memory of the GPU that nothing has been written to: NaN, so that a number that a kernel forgets is seen."""
    return Memory(np.full(shape, np.nan, np.float32))


@dataclass
class Record:
    """What kernels did, one entry for each start; `phase` is what the next ones belong to."""

    phase: str = ""
    launches: list[tuple] = field(default_factory=list)  #: (phase, kernel, reads, writes, bytes of its arrays)

    def after(self, start: Callable) -> Callable:
        """`start(kernel, *arguments)`, which makes an entry when the kernel is done."""

        @functools.wraps(start)
        def recorded(kernel: Callable, *arguments: object, **options: int) -> None:
            start(kernel, *arguments, **options)
            arrays = [x for x in arguments if isinstance(x, Memory)]
            counted = {id(x.accesses): x for x in arrays}.values()  # views of one array share its accesses
            reads, writes = sum(x.reads for x in counted), sum(x.writes for x in counted)
            self.launches.append((self.phase, kernel.__name__, reads, writes, sum(x.nbytes for x in arrays)))
            for x in counted:
                x.accesses.clear()

        return recorded


def record(stage2: ModuleType) -> Record:
    """Let workshop/from_scratch/gpu.py keep its arrays in Memory, and count what each kernel that it starts does.

    An atomic addition counts as two reads and a write, because that is what the simulator makes of it.
    """
    made = Record()
    for name in ("by_number", "by_row", "by_tile"):
        setattr(stage2, name, made.after(inspect.unwrap(getattr(stage2, name))))  # unwrapped: called a second time
    stage2.to_device, stage2.to_host, stage2.empty = to_gpu, Memory.to_host, empty
    return made


def compiled(kernels: Sequence[Callable], program: str, simulate: bool = False, **constants: int) -> object:
    """Run `program` in a process of its own, in which Numba compiles `kernels` for the GPU of this machine.

    The program finds `cuda`, `float32`, `math`, `np`, the kernels and the constants, which stand in for the notebook's;
    what it assigns to `result` is returned. simulate=True runs it here, without a GPU. Raises GpuError
    with the last line that it wrote if it fails.
    """
    source = ["import json, math", "import numpy as np", "from numba import cuda, float32"]
    source += [f"{name} = {value!r}" for name, value in constants.items()]
    source += [inspect.getsource(kernel) for kernel in kernels]
    source += [program, "print(json.dumps(result))"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(source)],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": str(int(simulate))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if re.search(r"\w{3}", line)]
        advice = "numba-cuda[cu13] must be installed for Numba to compile"
        raise GpuError(f"the kernels did not run on the GPU, and {advice}: {said[-1] if said else 'no message'}")
    return json.loads(done.stdout.splitlines()[-1])
