"""Connect the ranks of a job, count what they send, and end the job when one of them fails.

world = connect()           # under torchrun, srun, mpiexec, in a notebook's engine, or alone
world.rank, world.size, world.device
world.traffic.snapshot()    # bytes by collective since the start
"""

from aiscale.measure.distributed.connect import PeerError, World, connect
from aiscale.measure.distributed.counter import Traffic
from aiscale.measure.distributed.failing import alike, end_now, lost_another_rank
from aiscale.measure.distributed.rendezvous import ConnectError, Launch, find_launch, host_store
