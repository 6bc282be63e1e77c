"""2-D tensor parallelism on a square of ranks: every matrix, activations too, is cut into one block a rank.

    grid = SquareGrid(connect())                       # 4 ranks as 2 x 2, 9 as 3 x 3
    a, b = grid.cut(A), grid.cut(B)              # this rank's blocks
    c = grid.matmul(a, b)                        # its block of A B; gradients work, so layers can be chained
    grid.whole(c)                                # A B on every rank, to compare

The product is SUMMA (van de Geijn and Watts 1997), as in Colossal-AI: in turn k, column k's blocks of A are broadcast
along the rows and row k's blocks of B down the columns, and each rank adds up the products. For dA = dC B^T and
dB = A^T dC one operand is broadcast and the product reduced to its owner.

Shapes: A (M,K), B (K,N), C (M,N); q x q ranks; blocks a (M/q,K/q), b (K/q,N/q), c (M/q,N/q).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from aiscale.distributed import World


class SquareGrid:
    def __init__(self, world: World) -> None:
        """Raises ValueError if the number of ranks is not a square. All ranks call it together."""
        self.world, self.side = world, math.isqrt(world.size)
        if self.side**2 != world.size:
            raise ValueError(f"{world.size} ranks are no square: start {self.side**2} or {(self.side + 1) ** 2}")
        self.row, self.col = divmod(world.rank, self.side)
        mesh = world.mesh(row=self.side, col=self.side)
        self.along_row, self.down_column = mesh.get_group("col"), mesh.get_group("row")

    def cut(self, matrix: Tensor) -> Tensor:
        """This rank's block of a matrix; raises ValueError if it cannot be cut evenly."""
        if any(size % self.side for size in matrix.shape):
            raise ValueError(f"a matrix of {tuple(matrix.shape)} cannot be cut into {self.side} x {self.side} blocks")
        return matrix.chunk(self.side, 0)[self.row].chunk(self.side, 1)[self.col].contiguous()

    def whole(self, block: Tensor) -> Tensor:
        """The matrix of all blocks, on every rank; carries no gradient, and is not counted."""
        blocks = self.world.gather(block.detach())
        return torch.cat([torch.cat(blocks[i : i + self.side], 1) for i in range(0, len(blocks), self.side)], 0)

    def matmul(self, a: Tensor, b: Tensor, *, fault: str = "") -> Tensor:
        """This rank's block of A B. `fault` plants one: turn (the last one is left out), reduction (of dA)."""
        return _Summa.apply(a, b, self, fault)

    def payload_bytes(self, a: Tensor, b: Tensor) -> dict[str, int]:
        """{collective: bytes} of a rank's buffers in `matmul`, as `Traffic` counts them: forward and again backward a
        broadcast of each operand in each turn, and backward a reduction of each gradient."""
        once = self.side * (a.numel() * a.element_size() + b.numel() * b.element_size())
        return {"broadcast": 2 * once, "reduce": once}

    def broadcast(self, block: Tensor, turn: int, of: str) -> Tensor:
        """Of A the block in column `turn` of this row, of B the one in row `turn` of this column."""
        mine, group = (self.col, self.along_row) if of == "A" else (self.row, self.down_column)
        block = block.contiguous() if turn == mine else torch.empty(block.shape, dtype=block.dtype)
        dist.broadcast(block, group_src=turn, group=group)
        return block


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, grid: SquareGrid, fault: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.grid, ctx.fault = grid, fault
        return sum(grid.broadcast(a, k, "A") @ grid.broadcast(b, k, "B") for k in range(grid.side - (fault == "turn")))

    @staticmethod
    def backward(ctx, dc: Tensor):
        (a, b), grid, da, db = ctx.saved_tensors, ctx.grid, None, None
        for turn in range(grid.side):
            of_a = dc @ grid.broadcast(b, turn, "B").mT  # this rank's share of dA in column `turn`
            if ctx.fault != "reduction":
                dist.reduce(of_a, group_dst=turn, group=grid.along_row)
            of_b = grid.broadcast(a, turn, "A").mT @ dc
            dist.reduce(of_b, group_dst=turn, group=grid.down_column)
            da, db = of_a if turn == grid.col else da, of_b if turn == grid.row else db
        return da, db, None, None
