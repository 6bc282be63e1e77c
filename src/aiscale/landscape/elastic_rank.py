"""One rank of an elastic job: trains its stages, and when another rank dies, goes on in a new group of the survivors.

    python -m aiscale.landscape.elastic_rank FOLDER        # started by aiscale.landscape.elastic, connected

A step is: forward and backward passes, gradients added up over all copies of a layer, one exchange of the losses (the
commit), the update. If one survivor has passed the commit, all have their gradients, and those behind it update too.
Otherwise nobody has, and the step is finished (Bamboo), repeated (Oobleck), or lost with those since the checkpoint.

Shapes: B sequences of one micro-batch, T tokens, D width.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from aiscale.config import ModelConfig, OptimizerConfig
from aiscale.distributed import connect
from aiscale.landscape.plans import first_plan, next_plan
from aiscale.launch import LOST_STATUS
from aiscale.model import GPT
from aiscale.optim import build_optimizer
from aiscale.parallel.parts import Part

BATCH = 2  #: B


class Copy:
    """A stage on one rank: weights and optimizer, and what was computed of the running step."""

    def __init__(self, config: ModelConfig, layers: tuple[int, ...]) -> None:
        with torch.device("meta"):
            self.part = Part(GPT(config), layers, None)
        self.part.to_empty(device="cpu").double()
        self.layers, self.optimizer = layers, build_optimizer(self.part, OptimizerConfig(lr=1e-2))
        self.parameters = dict(self.part.named_parameters())
        self.clear()

    def clear(self) -> None:
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}  #: activations (B,T,D); of the last stage losses ()
        self.gradients: dict[int, Tensor | None] = {}  #: of the inputs
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """{parameter: (3, its shape)}: the parameter and Adam's two moments."""
        adam = {name: self.optimizer.state[p] for name, p in self.parameters.items()}
        return {
            n: torch.stack([p.detach(), adam[n]["exp_avg"], adam[n]["exp_avg_sq"]]) for n, p in self.parameters.items()
        }

    @torch.no_grad()
    def load(self, state: dict[str, Tensor], updates: int) -> None:
        for name, p in self.parameters.items():
            weight, first, second = state[name].clone()
            p.copy_(weight)
            self.optimizer.state[p] = {"step": torch.tensor(float(updates)), "exp_avg": first, "exp_avg_sq": second}


class Rank:
    def __init__(self, folder: Path) -> None:
        self.folder, self.spec = folder, json.loads((folder / "spec.json").read_text())
        self.idea, self.config = self.spec["idea"], ModelConfig(**self.spec["model"])
        self.world = connect("cpu", timeout_s=120)
        self.me, self.alive = self.world.rank, list(range(self.world.size))
        self.events = open(folder / f"events-{self.me}.jsonl", "a", buffering=1)
        self.sizes = {"layers": self.config.n_layer, "micro_batches": self.spec["micro_batches"]}
        self.plan = first_plan(self.idea, ranks=self.world.size, **self.sizes)
        self.restore()

    @property
    def step(self) -> int:
        return len(self.losses)

    def note(self, event: str) -> None:
        entry = {"rank": self.me, "event": event, "step": self.step, "at_s": time.monotonic()}
        print(json.dumps(entry), file=self.events)

    def train(self) -> None:
        while True:
            try:
                if self.step == self.spec["steps"]:
                    self.world.barrier()  # here a rank is missed that died after the last commit
                    break
                self.take_step()
                continue
            except RuntimeError as error:
                text = str(error)
            self.recover(text)  # not in `except`: the traceback would keep the broken group's messages
        weights = {name: p.detach() for copy in self.copies.values() for name, p in copy.parameters.items()}
        torch.save({"losses": self.losses, "weights": weights}, self.folder / f"end-{self.me}.pt")

    def take_step(self) -> None:
        if not self.done:
            self.note("begin")
        self.places = itertools.count()
        for work in self.plan.work():
            if work not in self.done:
                self.do(*work)
        self.may_die()
        self.share_gradients()
        self.may_die()
        last = [copy for copy in self.copies.values() if copy.part.is_last]
        mine = {m: loss.item() for copy in last for m, loss in copy.outputs.items()}
        parts = {m: loss for losses in self.world.gather(mine) for m, loss in losses.items()}  # the commit
        self.may_die()
        self.update(sum(parts[m] for m in sorted(parts)))

    def do(self, p: int, kind: str, m: int, s: int) -> None:
        """This rank's part in one pass: receive and compute, or send what the pass needs; then the shadow's pass."""
        stages, source = self.plan.pipelines[p], s - 1 if kind == "forward" else s + 1
        giver = stages[source].rank if 0 <= source < len(stages) else None
        here = self.copies.get((p, source))
        message = None if here is None else (here.outputs if kind == "forward" else here.gradients).get(m)
        if self.me == stages[s].rank:
            self.may_die()
            if giver not in (None, self.me):
                message = torch.empty(BATCH, self.config.max_seq_len, self.config.d_model, dtype=torch.float64)
                dist.recv(message, self.alive.index(giver))
            self.compute(self.copies[p, s], kind, m, message)
        elif self.me == giver:
            dist.send(message.detach().contiguous(), self.alive.index(stages[s].rank))
        ready = message is not None or s == 0  # a new shadow may lack earlier stages of this step
        if self.me == stages[s].shadow and kind == "forward" and ready:
            self.compute(self.copies[p, s], kind, m, message)

    def compute(self, copy: Copy, kind: str, m: int, given: Tensor | None) -> None:
        if kind == "backward":
            copy.outputs[m].backward(given)
            copy.outputs[m], copy.gradients[m] = copy.outputs[m].detach(), copy.inputs[m].grad
            return
        draw = torch.Generator().manual_seed(1000 * self.step + m)
        tokens = torch.randint(0, self.config.vocab_size, (BATCH, self.config.max_seq_len + 1), generator=draw)
        copy.inputs[m] = tokens[:, :-1] if copy.part.is_first else given.detach().requires_grad_()
        y = copy.part(copy.inputs[m])
        copy.outputs[m] = copy.part.loss(y, tokens[:, 1:]) / self.spec["micro_batches"] if copy.part.is_last else y

    def share_gradients(self) -> None:
        """Add up each layer's gradients over the ranks that hold it; a shadow adds 0 and gets those of its stage."""
        mine = {name: p for copy in self.copies.values() for name, p in copy.parameters.items()}
        for group, names in self.groups if self.spec["fault"] != "reduction" else ():
            parameters = [mine[name] for name in names]
            flat = torch.cat([(p * 0 if p.grad is None else p.grad).detach().flatten() for p in parameters])
            dist.all_reduce(flat, group=group)
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad = part.view_as(p).clone()

    def update(self, loss: float) -> None:
        for copy in self.copies.values():
            copy.optimizer.step()
            copy.clear()
        self.note("done")
        self.losses.append(loss)
        self.done = set()
        if self.idea in ("varuna", "restart") and self.step % self.spec["checkpoint_every"] == 0:
            self.save()

    def may_die(self) -> None:
        """Here the rank of the scenario kills itself, once: as abruptly as a node is lost."""
        if [self.me, self.step, next(self.places)] == self.spec["kill"] and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            self.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    def recover(self, text: str) -> None:
        gone = self.world.gone(timeout_s=60)
        if not gone:
            raise RuntimeError(text)
        self.note("detected")
        if self.idea == "restart":
            sys.exit(LOST_STATUS)
        self.alive = [rank for i, rank in enumerate(self.alive) if i not in gone]
        rank, size = str(self.alive.index(self.me)), str(len(self.alive))
        os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
        self.groups = []
        gc.collect()
        self.world = connect("cpu", timeout_s=120)  # closes the broken group, so that the others' calls fail, too
        furthest = max(self.world.gather(self.losses), key=len)
        if self.step < len(furthest):
            self.update(furthest[-1])
        self.plan = next_plan(self.idea, self.plan, self.alive, **self.sizes)
        if self.idea == "varuna":
            self.restore()
        else:
            self.rebuild({name: tensor for copy in self.copies.values() for name, tensor in copy.state().items()})
            self.keep_work()

    def rebuild(self, state: dict[str, Tensor]) -> None:
        """Make the copies that the plan asks for, from `state` or else from the first rank that has it."""
        stages = {(p, s): stage for p, pipeline in enumerate(self.plan.pipelines) for s, stage in enumerate(pipeline)}
        layers_of = {key: stage.layers for key, stage in stages.items() if self.me in (stage.rank, stage.shadow)}
        copies = {key: copy for key, copy in self.copies.items() if layers_of.get(key) == copy.layers}
        self.copies = {key: copies.get(key) or Copy(self.config, layers) for key, layers in layers_of.items()}
        shapes = {name: p.shape for copy in self.copies.values() for name, p in copy.parameters.items()}
        table = self.world.gather((set(state), set(shapes)))
        for name in sorted(set().union(*(needs for _, needs in table))):
            giver = next((rank for rank, (has, _) in enumerate(table) if name in has), None)
            if giver is None:
                raise RuntimeError(f"no rank has {name} any more: resume from a checkpoint")
            for taker in (rank for rank, (has, needs) in enumerate(table) if name in needs - has):
                if self.world.rank == giver:
                    dist.send(state[name], taker)
                elif self.world.rank == taker:
                    dist.recv(state.setdefault(name, torch.empty(3, *shapes[name], dtype=torch.float64)), giver)
        if self.spec["fault"] == "moments" and self.step:
            state = {
                name: tensor * torch.eye(3)[0].view(3, *[1] * (tensor.dim() - 1)) for name, tensor in state.items()
            }
        for copy in (copy for key, copy in self.copies.items() if key not in copies):
            copy.load(state, self.step)
        holders: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(set().union(*(needs for _, needs in table))):
            holders.setdefault(tuple(r for r, (_, needs) in enumerate(table) if name in needs), []).append(name)
        several = [(dist.new_group(ranks), ranks, names) for ranks, names in holders.items() if len(ranks) > 1]
        self.groups = [(group, names) for group, ranks, names in several if self.world.rank in ranks]

    def keep_work(self) -> None:
        """Oobleck starts the step again. In Bamboo what the survivors have computed stays, and an heir has the forward
        passes that it made as a shadow."""
        mine = set()
        for (p, s), copy in self.copies.items():
            if self.idea == "oobleck":
                copy.clear()
            elif self.plan.pipelines[p][s].rank == self.me:
                mine |= {(p, "forward", m, s) for m in copy.outputs} | {(p, "backward", m, s) for m in copy.gradients}
            if not copy.gradients:
                copy.optimizer.zero_grad()  # an heir's, or a shadow's: those that it was given
        self.done = set().union(*self.world.gather(mine))
        if self.idea == "bamboo":
            self.done.add("begun")

    def save(self) -> None:
        """Each stage of the first pipeline writes a file; a checkpoint is complete when all have."""
        for s, stage in enumerate(self.plan.pipelines[0]):
            if stage.rank == self.me:
                file = self.folder / f"step{self.step}-{s}of{len(self.plan.pipelines[0])}.pt"
                torch.save({"losses": self.losses, "state": self.copies[0, s].state()}, file.with_suffix(".part"))
                file.with_suffix(".part").rename(file)

    def newest(self) -> list[Path]:
        """The files of the newest complete checkpoint; none if there is none."""
        found: dict[tuple[int, int], list[Path]] = {}
        for file in self.folder.glob("step*-*of*.pt"):
            step, _, of = map(int, re.findall(r"\d+", file.name))
            found.setdefault((step, of), []).append(file)
        return max([(step, files) for (step, of), files in found.items() if len(files) == of] or [(0, [])])[1]

    def restore(self) -> None:
        """Everything from the newest checkpoint, or from the seed."""
        saved = [torch.load(file) for file in self.world.from_rank0(self.newest)]
        self.losses, self.copies, self.done = saved[0]["losses"] if saved else [], {}, set()
        torch.manual_seed(1337)
        start = {} if saved else GPT(self.config).double().state_dict()
        state = {name: torch.stack([p, p * 0, p * 0]) for name, p in start.items()}
        self.rebuild(state | {name: tensor for file in saved for name, tensor in file["state"].items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = Rank(Path(sys.argv[1]))
    rank.train()
    rank.world.close()
