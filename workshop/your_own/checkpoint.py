"""A checkpoint in one file, which rank 0 writes: all ranks hold the same."""

import os

import torch
from shared_folder import check_shared, gather


def save(path, model, optimizer, steps):
    if int(os.environ.get("RANK", 0)) == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
        torch.save(saved, f"{path}.part")
        os.replace(f"{path}.part", path)  # killed here, it leaves the old file or the new one, whole


def load(path, model, optimizer, gather=gather):
    """The number of steps that the checkpoint has seen, 0 without one."""
    check_shared(path, gather)
    exists = gather(os.path.exists(path))[0]  # rank 0 looks, and all follow
    if not exists:
        return 0
    saved = torch.load(path, map_location="cpu")  # both copy it to where their tensors are
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["steps"]
