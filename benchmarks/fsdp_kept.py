"""The trainer fsdp, whose gathered weights stay until the backward pass. largest.py compares it."""

import runpy
from functools import partial

from torch.distributed import fsdp

fsdp.fully_shard = partial(fsdp.fully_shard, reshard_after_forward=False)
runpy.run_module("aiscale.train.fsdp", run_name="__main__", alter_sys=True)
