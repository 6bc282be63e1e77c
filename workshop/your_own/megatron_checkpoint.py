"""A checkpoint of Megatron-Core in a folder: each rank writes its slices, and another grid can read them."""

from pathlib import Path

from megatron.core import dist_checkpointing
from shared_folder import check_shared, gather

#: Of the optimizer's slices: one that any grid can read.
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


def states(model, optimizer, loading):
    weights = model.module.sharded_state_dict()  # slices that know their place in the whole
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=FORMAT)}


def save(path, model, optimizer, steps):
    folder = Path(path) / f"{steps:06}"
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({**states(model, optimizer, False), "steps": steps}, str(folder))


def load(path, model, optimizer):
    check_shared(path)  # else its slices would lie on several disks
    # Metadata are written last. Rank 0 looks, and all follow.
    whole = gather(sorted(Path(path).glob("*/metadata.json")))[0]
    if not whole:
        return 0
    optimizer.step()  # makes its states: the gradients are zero, and all that it changes is read anew
    saved = dist_checkpointing.load({**states(model, optimizer, True), "steps": 0}, str(whole[-1].parent))
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["steps"]
