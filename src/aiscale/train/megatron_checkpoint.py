"""A checkpoint of Megatron-Core: each rank writes its slices, and another grid can read them."""

from megatron.core import dist_checkpointing

from aiscale.train.sharded_checkpoint import newest, write

#: Of the optimizer's slices: one that any grid can read.
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def inner(chunk):
    """Megatron-Core's model, without the wrapper that computes in 16 bits."""
    return getattr(chunk.module, "module", chunk.module)


def states(chunks, optimizer, loading):
    # Slices know their place in the whole, whichever chunk has them.
    weights = {f"model{n}": inner(chunk).sharded_state_dict() for n, chunk in enumerate(chunks)}
    moments = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=FORMAT)
    return {**weights, "optimizer": moments}


def save(path, chunks, optimizer, steps):
    state = states(chunks, optimizer, False)
    write(path, steps, lambda folder: dist_checkpointing.save(state, str(folder)))


def load(path, chunks, optimizer):
    """The steps that the newest checkpoint has seen, 0 without one."""
    folder, steps = newest(path)
    if folder:
        # Makes its states: the gradients are zero, and all that it changes is read anew.
        optimizer.step()
        saved = dist_checkpointing.load(states(chunks, optimizer, True), str(folder))
        for n, chunk in enumerate(chunks):
            inner(chunk).load_state_dict(saved[f"model{n}"])
        optimizer.load_state_dict(saved["optimizer"])
    return steps
