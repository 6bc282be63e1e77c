"""Windows of a text that is not in memory: mapped, read into RAM (spooled), or copied (staged).

    # 4 GB, written and removed again: minutes
    python benchmarks/cold_data.py OUT.json
    # more than this machine's memory
    python benchmarks/cold_data.py OUT.json --gb 30 --folder /scratch/me

Reads windows in the random order of training, other ones in each round.
Before a cold measurement the file leaves the page cache, for which nobody needs to be root: fsync,
then posix_fadvise(DONTNEED); `resident` is the share that mincore still finds. A reboot would empty
more: the disk's own cache and, of a virtual machine, its host's. What does not fit into memory is
left out. `steps` are starved ones: they wait for their batch, then sleep as long as a GPU might
compute; `read ahead` has a thread that is one batch ahead.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
from common import machine_facts

from aiscale.train.data import Windows, batches

T, BATCH, STEPS, ROUNDS, COMPUTE_S, BLOCK = 1024, 16, 40, 3, 0.01, 2**24


def write(file, size):
    """Random tokens, so that no disk compresses them."""
    draw = np.random.default_rng(0)
    with file.open("wb") as stream:
        for start in range(0, size, BLOCK):
            stream.write(draw.bytes(min(BLOCK, size - start)))


def mapped(file, advice=mmap.MADV_NORMAL):
    with file.open("rb") as stream:
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    pages.madvise(advice)
    return np.frombuffer(pages, "<u2")


def read(file, keep=True):
    """The whole file, in order; keep: into this process, else only through the page cache."""
    held, at = np.empty(file.stat().st_size if keep else BLOCK, np.uint8), 0
    with file.open("rb", buffering=0) as stream:
        while got := stream.readinto(held[at : at + BLOCK]):
            at += got * keep
    return held.view("<u2") if keep else mapped(file)


def copied(file, to):
    return mapped(Path(shutil.copy(file, to)))


def evict(file):
    """Take the file out of the page cache; the share that stays there."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tokens = mapped(file)
    pages = np.zeros(-(-tokens.nbytes // mmap.PAGESIZE), np.uint8)
    address, found = map(ctypes.c_void_p, (tokens.ctypes.data, pages.ctypes.data))
    if ctypes.CDLL(None).mincore(address, ctypes.c_size_t(tokens.nbytes), found):
        raise OSError("mincore failed")
    return float((pages & 1).mean())


def take(tokens, first, ahead=False, compute_s=0.0):
    """STEPS steps from `first` on: [(seconds waited for the batch, seconds of the step)]."""
    options = argparse.Namespace(batch=BATCH, steps=first + STEPS + 1)
    steps, found = batches(Windows(tokens, T), first, options, 0, 1), []
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, steps)
        for _ in range(STEPS):
            start = time.perf_counter()
            coming = coming if ahead else reader.submit(next, steps)
            coming.result()
            waited = time.perf_counter() - start
            if ahead:
                coming = reader.submit(next, steps)
            time.sleep(compute_s)
            found.append((waited, time.perf_counter() - start))
    return found


def from_disk():
    return psutil.Process().io_counters().read_bytes


def measure(file, stage):
    """Each way in each round: seconds to prepare, MB/s of windows, bytes from the disk a byte."""
    size, copy = file.stat().st_size, stage / file.name
    fits = size < 0.6 * psutil.virtual_memory().available
    ways = {
        "mapped": lambda: mapped(file),
        "mapped, MADV_RANDOM": lambda: mapped(file, mmap.MADV_RANDOM),
    }
    if fits:
        ways |= {"spooled": lambda: read(file), "mapped, warm": lambda: read(file, keep=False)}
        ways |= {"spooled from a warm file": lambda: read(file)}
    if shutil.disk_usage(stage).free > 1.1 * size and (fits or "shm" not in str(stage)):
        ways |= {f"staged to {stage}": lambda: copied(file, copy)}
    found, used = {name: [] for name in ways}, STEPS * BATCH * (T + 1) * 2
    for number in range(ROUNDS):
        for name, make in ways.items():
            resident = None if "warm file" in name else evict(file)
            start = time.perf_counter()
            tokens = make()
            prepare_s, before = time.perf_counter() - start, from_disk()
            steps_s = sum(step_s for _, step_s in take(tokens, number * STEPS))
            mb_s, disk = used / steps_s / 1e6, (from_disk() - before) / used
            row = {
                "prepare_s": prepare_s,
                "mb_s": mb_s,
                "disk_bytes_per_byte": disk,
                "resident": resident,
            }
            found[name].append(row)
            del tokens
            copy.unlink(missing_ok=True)
    steps, first = {}, ROUNDS * STEPS
    for name, ahead in (("cold", False), ("cold, read ahead", True), ("warm", False)):
        if name != "warm":
            evict(file)
        else:
            take(mapped(file), first)  # the same windows, once before
        steps[name] = take(mapped(file), first, ahead, COMPUTE_S)
    return {
        "ways": [{"name": name, **spread(rows)} for name, rows in found.items()],
        "steps": steps,
    }


def spread(rows):
    """Of each figure the median over the rounds, and the lowest and highest."""
    figures = {key: [row[key] for row in rows if row[key] is not None] for key in rows[0]}
    return {
        key: {"median": statistics.median(values), "low": min(values), "high": max(values)}
        if values
        else None
        for key, values in figures.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the file (10^9 bytes)")
    parser.add_argument(
        "--folder", type=Path, help="where to write it; default: the folder for temporary files"
    )
    parser.add_argument("--stage", type=Path, default=Path("/dev/shm"), help="the faster storage")
    args = parser.parse_args()
    size = int(args.gb * 1e9) // 2 * 2
    with TemporaryDirectory(dir=args.folder) as folder:
        file = Path(folder, f"cold_data_{os.getpid()}.bin")
        start = time.perf_counter()
        write(file, size)
        if evict(file) > 0.05:
            raise SystemExit(
                f"{folder} keeps files in memory, as a tmpfs does: name a --folder on a disk"
            )
        found = {"write_s": time.perf_counter() - start, **measure(file, args.stage)}
    shape = {
        "file_bytes": size,
        "seq_len": T,
        "global_batch": BATCH,
        "compute_s": COMPUTE_S,
        "rounds": ROUNDS,
    }
    args.out.write_text(json.dumps({"machine": machine_facts(), **shape, **found}, indent=1))
    for way in found["ways"]:
        mb_s, disk, before = (
            way[key]["median"] for key in ("mb_s", "disk_bytes_per_byte", "prepare_s")
        )
        print(
            f"{way['name']:26} {mb_s:8.1f} MB/s, {disk:5.1f} bytes from the disk a byte, "
            f"{before:6.2f} s before"
        )
    for name, steps in found["steps"].items():
        waited, whole = map(sum, zip(*steps, strict=True))
        print(f"steps, {name:19} wait for data {waited / whole:.0%} of their time")
