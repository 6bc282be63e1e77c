"""A checkpoint in a folder, to which each rank writes its slices. Another number of ranks can read it."""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from shared_folder import check_shared, gather
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # works also where ranks optimize different parameters


def save(path, model, optimizer, steps):
    weights, moments = get_state_dict(model, optimizer, options=FLAT)  # slices, under the names of whole tensors
    dcp.save({"model": weights, "optimizer": moments, "steps": steps}, checkpoint_id=f"{path}/{steps:06}")


def load(path, model, optimizer):
    check_shared(path)  # else its slices would lie on several disks
    # Metadata are written last. Rank 0 looks, and all follow.
    whole = gather(sorted(Path(path).glob("*/.metadata")))[0]
    if not whole:
        return 0
    weights, moments = get_state_dict(model, optimizer, options=FLAT)
    saved = {"model": weights, "optimizer": moments, "steps": 0}
    dcp.load(saved, checkpoint_id=whole[-1].parent)  # each rank reads what it needs, whoever wrote it
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
    return saved["steps"]
