"""Two warnings of the four stages' authors, measured: mpiexec -n 2 python -m from_scratch.pitfalls

"Avoid blocking calls for synchronization: they can cause deadlocks", and "sending many small chunks".
"""

import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
OTHER = 1 - comm.Get_rank()


def both_send_first(n_numbers, patience_s=0.5):
    """Whether two ranks get on that both send before either receives."""
    comm.Barrier()
    sent, got = np.ones(n_numbers, np.float32), np.empty(n_numbers, np.float32)
    # Send would block here, maybe for ever. Isend and Test show the same without hanging.
    sending = comm.Isend(sent, dest=OTHER)
    until = time.perf_counter() + patience_s
    while not (done := sending.Test()) and time.perf_counter() < until:
        pass
    comm.Recv(got, source=OTHER)
    sending.Wait()
    return done


def seconds(messages):
    """For sums of these arrays over both ranks, one after the other: the fastest of 20 rounds."""
    rounds = []
    for _ in range(20):
        comm.Barrier()
        began = time.perf_counter()
        for array in messages:
            comm.Allreduce(MPI.IN_PLACE, array)
        rounds.append(time.perf_counter() - began)
    return min(rounds)


def main():
    say = print if comm.Get_rank() == 0 else lambda *_: None
    for n_bytes in (1 << 10, 1 << 16, 1 << 22):
        done = both_send_first(n_bytes // 4)
        say(f"both send {n_bytes:>9,} bytes first: {'MPI buffers it, and they get on' if done else 'DEADLOCK'}")
    both = np.ones(1 << 20, np.float32)
    comm.Sendrecv(both.copy(), dest=OTHER, recvbuf=both, source=OTHER)
    say(f"Sendrecv of {both.nbytes:>9,} bytes: done, whatever the size")
    whole = np.zeros(1 << 16, np.float32)
    one_s = seconds([whole])
    for n in (16, 256, 4096):
        many_s = seconds(np.split(whole, n))
        say(f"{whole.nbytes:,} bytes in {n:4} messages take {many_s / one_s:5.1f} times as long as in one")


if __name__ == "__main__":
    main()
