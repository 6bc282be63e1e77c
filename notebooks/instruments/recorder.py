"""Memory of one rank under FSDP, by kind, after each operation: what lesson 05 draws."""

from __future__ import annotations

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from aiscale.processes import give_back_memory


class Recorder(FSDPMemTracker):
    """torch's tracker of a model and its optimizer; `levels` has {kind: bytes} after each operation on the CPU."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.levels = []

    def _update_peak_stats(self, peak_state):  # called after every operation
        super()._update_peak_stats(peak_state)
        held = self.get_tracker_snapshot("current")[torch.device("cpu")]
        self.levels.append({getattr(kind, "value", kind): nbytes for kind, nbytes in held.items()})


def second_step(model, loss):
    """(levels over a second step with AdamW, how many of them the forward and both passes have).

    `loss()` is the model's. The first step allocates Adam's moments.
    """
    give_back_memory()  # that of the model before this one
    optimizer = torch.optim.AdamW(model.parameters())
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    recorder = Recorder(model, optimizer)
    recorder.track_external(optimizer)
    with recorder:
        passed = loss()
        ends = [len(recorder.levels)]
        passed.backward()
        ends.append(len(recorder.levels))
        optimizer.step()
    return recorder.levels, ends
