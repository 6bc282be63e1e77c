"""Connect the ranks of a job, count what they send, and end the job when one of them fails or hangs.

world = connect()                     # under torchrun, srun, mpiexec, in a notebook's engine, or alone
world.rank, world.size, world.device
world.traffic.snapshot()              # bytes by collective since the start

rendezvous, connect   find rank and world size, meet at a store, form the process group
counter, wire         count traffic, over NCCL and over gloo
link                  emulate a slow link
fake                  one rank of a large world, without the others
failing, hangs        report a failure once; name a hang and end the job
"""

from aiscale.distributed.connect import PeerError, World, connect
from aiscale.distributed.counter import Traffic
from aiscale.distributed.failing import alike, end_now, lost_another_rank
from aiscale.distributed.hangs import watching
from aiscale.distributed.rendezvous import ConnectError, Launch, find_launch, host_store
