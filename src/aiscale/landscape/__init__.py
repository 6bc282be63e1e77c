"""Ideas of other frameworks that no strategy of ours carries, each small and held to serial training.

ring                           context parallelism: causal attention over a sequence that is cut over the ranks
grid                           Colossal-AI's 2-D tensor parallelism, by SUMMA
messages                       AxonNN's pipeline, in which the message that arrives first is next
elastic, elastic_rank, plans   Bamboo, Oobleck, Varuna: jobs that survive the death of a rank
"""

from aiscale.landscape.grid import SquareGrid
from aiscale.landscape.messages import Passed, message_driven
from aiscale.landscape.ring import ring_attention, unzigzag, zigzag
