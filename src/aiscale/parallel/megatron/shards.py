"""Checkpoints of the megatron strategy: each rank writes a file of its shards; any layout can read them.

A shard is a range of the flattened tensor of one tensor-parallel rank: with the distributed optimizer (ZeRO-1),
data-parallel ranks cut masters and moments anywhere, not only between rows.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aiscale import cost
from aiscale.checkpoint import flush
from aiscale.config import ModelConfig
from aiscale.distributed import World
from aiscale.parallel.megatron.layout import Grid, Slot, slots
from aiscale.parallel.serial import on_rank0


@dataclass
class Shard:
    """A range of one parameter, and the optimizer's state for it."""

    stage: int  #: of the model
    name: str  #: Megatron-Core's, within its stage
    slot: Slot
    parameter: Tensor  #: this rank's whole parameter, in the model's precision
    main: Tensor | None  #: what the optimizer updates: a master copy, a view or the parameter itself; None: not here
    start: int  #: the range of the flat parameter that main covers
    end: int
    state: dict  #: the optimizer's, for main


Piece = tuple[int, int, Tensor]  # start, end, numbers


def assemble(slot: Slot, shape: tuple[int, ...], pieces: dict[int, list[Piece]]) -> Tensor:
    """The full tensor in GPT's order, from the pieces of all tensor-parallel ranks."""
    full = torch.empty(shape, dtype=next(iter(pieces.values()))[0][2].dtype)
    local = slot.shape(shape)
    for tp_rank, parts in pieces.items():
        flat = torch.empty(local, dtype=full.dtype).view(-1)
        for start, end, numbers in parts:
            flat[start:end] = numbers
        slot.paste(flat.view(local), full, tp_rank)
    return full


def content(shards: Iterable[Shard], *, rank: int, grid: Grid, model: ModelConfig, optimizer: str) -> dict:
    """The content of this rank's file: masters, moments and step counts of its shards."""
    entries = []
    for shard in shards:
        tensors = {"weight": _copy(shard.main)}
        counts = {}
        for key, value in shard.state.items():
            if torch.is_tensor(value) and value.numel() == shard.main.numel() and key != "step":
                tensors[key] = _copy(value)
            elif value is not None:
                counts[key] = float(value)
        where = {"stage": shard.stage, "name": shard.name, "start": shard.start, "end": shard.end}
        entries.append({**where, "tensors": tensors, "counts": counts})
    return {
        "rank": rank,
        "grid": dataclasses.asdict(grid),
        "model": dataclasses.asdict(model),
        "optimizer": optimizer,
        "entries": entries,
    }


def _copy(tensor: Tensor) -> Tensor:
    """Flat, in memory of its own: torch would save the whole buffer behind a view."""
    return tensor.detach().reshape(-1).to("cpu", copy=True)


def write(folder: Path, content: dict) -> None:
    file = folder / f"rank_{content['rank']:05d}.pt"
    torch.save(content, file)
    flush(file)


class Saved:
    """The files of all ranks, as one state under GPT's names."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("rank_*.pt"))
        files = [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in paths]
        self.optimizer, self.scaler = files[0]["optimizer"], files[0].get("scaler")
        self.grid, self.model = Grid(**files[0]["grid"]), ModelConfig(**files[0]["model"])
        self.shapes = cost.parameter_shapes(self.model)
        self.slots: dict[str, Slot] = {}
        self._entries: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
        for content in files:
            tp_rank, _, _ = self.grid.coordinates(content["rank"])
            by_stage = [slots(self.model, self.grid, stage) for stage in range(self.grid.stages)]
            for entry in content["entries"]:
                slot = by_stage[entry["stage"]][entry["name"]]
                self.slots[slot.source] = slot
                self._entries[slot.source][tp_rank].append(entry)

    def tensor(self, source: str, key: str = "weight") -> Tensor | None:
        """The full weight or moment of one of GPT's parameters; None if the optimizer had not created it yet."""
        pieces = {
            tp_rank: [(entry["start"], entry["end"], entry["tensors"].get(key)) for entry in entries]
            for tp_rank, entries in self._entries[source].items()
        }
        if any(numbers is None for parts in pieces.values() for _, _, numbers in parts):
            return None
        return assemble(self.slots[source], self.shapes[source], pieces)

    def state(self, source: str) -> tuple[list[str], dict[str, float]]:
        """(names of the moments, counts) that the optimizer kept for one of GPT's parameters."""
        entry = next(iter(self._entries[source].values()))[0]
        return [key for key in entry["tensors"] if key != "weight"], entry["counts"]


def weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint under GPT's names; needs no process group."""
    saved = Saved(Path(folder))
    return {source: saved.tensor(source) for source in saved.shapes}


def gather(shards: list[Shard], world: World, grid: Grid, model: ModelConfig) -> dict[str, Tensor]:
    """All weights under GPT's names on rank 0, {} elsewhere. Collective; sends one tensor at a time."""
    mine = {(shard.slot.source, shard.start): shard for shard in shards}
    heads = world.gather([(source, start, shard.end) for (source, start), shard in mine.items()])
    plan = defaultdict(list)  # the same on every rank, so that sends and receives match
    for rank, found in enumerate(heads):
        for source, start, end in found:
            plan[source].append((rank, start, end))
    by_source = {slot.source: slot for stage in range(grid.stages) for slot in slots(model, grid, stage).values()}
    full, dtype = {}, next((shard.main.dtype for shard in shards), torch.float32)
    with world.control():
        for source, shape in cost.parameter_shapes(model).items():
            pieces: dict[int, list[Piece]] = defaultdict(list)
            for rank, start, end in plan[source]:
                own = mine[source, start].main.reshape(-1) if rank == world.rank else None
                numbers = on_rank0(world, rank, own, (end - start,), dtype)
                pieces[grid.coordinates(rank)[0]].append((start, end, numbers))
            if world.is_main:
                full[source] = assemble(by_source[source], shape, pieces)
    return full
