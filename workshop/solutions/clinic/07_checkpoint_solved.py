"""A checkpoint of rank 0's slices."""

import tempfile
from pathlib import Path

from jobs import Unmended, start
from model import read_windows
from serial import TOLERANCE, adamw, all_steps, equal, ran, train

RANKS = 2
RIGHT = "a"
REPLIES = {
    "b": "AdamW's moments are in the file. And a run that forgets them jumps by a little, after the first resumed "
    "step, not before it: here the first loss is wrong already.",
    "c": "The data go on at the right place: the resumed run reads batches[6], as `range(first, ...)` says.",
    "d": "os.replace is atomic, and a file cut short would not open. It opens, with half of the weights.",
}
HINTS = [
    "How large is model.pt, and how large would weights and two moments of all 42,816 parameters be, 4 bytes each?",
    "On rank 1, compare `weight.to_local()` before saving and after loading: whose slice is it now?",
    "A state_dict under FSDP holds DTensors; what is pickled is this rank's slice. All ranks must take part in saving.",
    "torch.distributed.checkpoint (dcp.save, dcp.load), or get_model_state_dict(full_state_dict=True) on all ranks.",
]
EXPLANATION = """\
Under FSDP a rank's state_dict holds DTensors: the shape is that of the whole tensor, the data are this rank's slice.
`torch.save` on rank 0 writes rank 0's slices; the others are lost. On loading, every rank puts rank 0's slices where
its own should be, with the right shapes and no complaint: rank 0 is right, rank 1 has the wrong half of each tensor.
The file's size tells: half of what it should be. So does the first resumed step, held against the step before.

Saving is a collective under FSDP. Either all ranks gather (`get_model_state_dict` with full_state_dict, called on *all*
ranks; only the writing belongs to rank 0), or each writes its slices and a record of what lies where
(torch.distributed.checkpoint, below): that also opens on another number of ranks. A file for each rank, by hand, does
not. The optimizer's moments are sharded as the weights are.
"""
_SAVE = """\
    if dist.get_rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
        torch.save(saved, f"{path}.part")
        os.replace(f"{path}.part", path)  # a job that is killed here leaves the old file or the new one, whole
    dist.barrier()
"""
_LOAD = """\
    saved = torch.load(path, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["steps"]
"""
_IMPORTS = [
    (
        "import torch.distributed as dist\n",
        "import torch.distributed as dist\nimport torch.distributed.checkpoint as dcp\n",
    ),
    (
        "from torch.distributed.fsdp import",
        "from torch.distributed.checkpoint import state_dict as states\nfrom torch.distributed.fsdp import",
    ),
]
MENDED = [
    *_IMPORTS,
    (
        _SAVE,
        "    weights, moments = states.get_state_dict(model, optimizer)\n"
        '    dcp.save({"model": weights, "optimizer": moments, "steps": steps}, checkpoint_id=path)\n',
    ),
    (
        _LOAD,
        "    weights, moments = states.get_state_dict(model, optimizer)\n"
        '    saved = {"model": weights, "optimizer": moments, "steps": 0}\n'
        "    dcp.load(saved, checkpoint_id=path)\n"
        "    states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)\n"
        '    return saved["steps"]\n',
    ),
]
WRONG = {
    "a file for each rank": (
        [
            (
                "    if dist.get_rank() == 0:\n        saved",
                "    path = f'{path}.{dist.get_rank()}'\n    if True:\n        saved",
            ),
            (
                "    if not os.path.exists(path)",
                "    path = f'{path}.{dist.get_rank()}'\n    if not os.path.exists(path)",
            ),
        ],
        "does not open on another number of ranks",
    ),
    "all ranks write the same file": (
        [
            ("    if dist.get_rank() == 0:\n", "    if True:\n"),
            ('f"{path}.part")\n        os', 'f"{path}.part{dist.get_rank()}")\n        os'),
            ('os.replace(f"{path}.part"', 'os.replace(f"{path}.part{dist.get_rank()}"'),
        ],
        "loss .* at step 6.*one rank's slices",
    ),
    "gathered on rank 0 alone": (
        [
            *_IMPORTS[1:],
            (
                '"model": model.state_dict()',
                '"model": states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))',
            ),
        ],
        "hangs|fails",
    ),
    "moments forgotten": (
        [
            *MENDED,
            ('"optimizer": moments, "steps": steps}', '"steps": steps}'),
            ('"optimizer": moments, "steps": 0}', '"steps": 0}'),
            (
                "states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)",
                "states.set_model_state_dict(model, weights)",
            ),
        ],
        "step 6 is right, step 7.*moments",
    ),
}
SYMPTOM = "loss .* at step 6, and .* in one process"


def check(program, seed):
    folder = Path(tempfile.mkdtemp(prefix="clinic-"))
    right = [loss for loss, _ in train(seed, read_windows(96).split(8), adamw)]
    first = ran(start(program, RANKS, folder, steps=6, seed=seed))
    equal(all_steps(first, 6), right[:6])
    again = ran(start(program, RANKS, folder, steps=12, seed=seed))
    found = dict(again.losses)
    if sorted(found) != list(range(6, 12)):
        raise Unmended(f"resumed after 6 steps of 12, rank 0 should take steps 6 to 11, but it took {sorted(found)}")
    if abs(found[6] - right[6]) < TOLERANCE and abs(found[7] - right[7]) > 3 * TOLERANCE:
        raise Unmended("the loss of step 6 is right, step 7 is not: weights came back, AdamW's moments did not")
    why = "Is what was saved all of the model, or one rank's slices?"
    for step in range(6, 12):
        if abs(found[step] - right[step]) > 2 * TOLERANCE:
            raise Unmended(f"loss {found[step]:.4f} at step {step}, and {right[step]:.4f} in one process. {why}")
    alone = start(program, 1, folder, steps=13, seed=seed)
    taken = [step for step, _ in alone.losses]
    if alone.trouble() or taken != [12]:
        what = alone.trouble() or f"one rank should take step 12 alone, and took {taken}"
        raise Unmended(
            f"resuming is right on 2 ranks, but the checkpoint does not open on another number of ranks: {what}"
        )
    last = train(seed, read_windows(104).split(8), adamw)[-1][0]
    if abs(alone.losses[0][1] - last) > 2 * TOLERANCE:
        raise Unmended(
            f"the checkpoint does not open on another number of ranks: loss {alone.losses[0][1]:.4f}, not {last:.4f}"
        )
