"""Bytes of collectives, and their seconds over equal links.

`collectives` has the seconds on a machine of the catalogue.

    wire_bytes("all_reduce", nbytes, world=4)                # one rank sends 2 (n-1)/n S on a ring
    AlphaBeta(latency_s=20e-6, bandwidth_bytes_s=2e9).seconds("all_gather", nbytes, 4)
    link = fit_alpha_beta(nbytes, seconds, "all_reduce", 4)  # a link fitted to measurements

S, the payload, is the whole buffer: every rank's output of an all-gather or broadcast, its input of
an all-reduce, reduce-scatter or all-to-all, the root's buffer of a scatter or gather. n is the
number of ranks. Time follows the alpha-beta model (Thakur, Rabenseifner and Gropp 2005): messages
are sequential, and each takes a latency alpha plus its bytes over the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aiscale.errors import ConfigError

Algorithm = Literal["ring", "gloo"]

COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
    *("scatter", "gather", "all_to_all", "send", "recv"),
)


def check_collective(op: str) -> None:
    if op not in COLLECTIVES:
        raise ConfigError(f"unknown collective {op!r}: it may be one of {', '.join(COLLECTIVES)}")


def all_reduce_wire_bytes(nbytes: float, world: int) -> float:
    """2 (n-1)/n S: a reduce-scatter, then an all-gather of the sums.

    No algorithm between ranks sends less (Patarasuk, Yuan 2009).
    """
    return 2 * nbytes * (world - 1) / world


def gloo_reduce_wire_bytes(nbytes: float, world: int) -> float:
    """Bytes sent by gloo's reduce, the mean over ranks.

    (n-1) S + (n-1)/n S + (k-2)/k S in all with k segments a rank, at least 2 and of at most 1 MiB;
    the last term is empirical.
    """
    if world == 1:
        return 0.0
    k = math.ceil(max(2 * world, math.ceil(nbytes / 2**20)) / world)
    return nbytes * ((world - 1) * (1 + 1 / world) + (k - 2) / k) / world


def wire_bytes(op: str, nbytes: float, world: int, algorithm: Algorithm = "ring") -> float:
    """Bytes that one rank sends (the mean, if ranks differ) for a payload of `nbytes`.

    "ring" is the algorithm of NCCL and RCCL for large messages. "gloo" differs in two collectives:
    its reduce-scatter sends as much as an all-reduce, its reduce even more (measured on the
    loopback, 2 to 4 ranks: equal to 1 %). Raises ConfigError for an unknown collective.
    """
    check_collective(op)
    fraction = (world - 1) / world
    if op == "all_reduce" or (op == "reduce_scatter" and algorithm == "gloo"):
        return all_reduce_wire_bytes(nbytes, world)
    if op == "reduce" and algorithm == "gloo":
        return gloo_reduce_wire_bytes(nbytes, world)
    if op in ("scatter", "gather"):  # (n-1)/n S pass the root's link once
        return nbytes * fraction / world
    if op == "recv":
        return 0.0
    return nbytes * (1.0 if op == "send" else fraction)


def collective_terms(
    op: str, nbytes: float, world: int, algorithm: Algorithm = "ring"
) -> tuple[float, float]:
    """(sequential messages, bytes through the busiest link).

    Seconds = messages alpha + bytes / bandwidth. "ring" pipelines broadcast and reduce, so that S
    bytes go through a link; "gloo" differs in four collectives (`_gloo_terms`).
    """
    check_collective(op)
    if world == 1 or op == "recv":
        return 0.0, 0.0
    if op == "send":
        return 1.0, float(nbytes)
    if algorithm == "gloo" and op in ("broadcast", "reduce", "reduce_scatter", "all_to_all"):
        return _gloo_terms(op, nbytes, world)
    rounds = (2 if op == "all_reduce" else 1) * (world - 1)
    busiest = float(nbytes) if op in ("broadcast", "reduce") else rounds * nbytes / world
    return float(rounds), busiest


def _gloo_terms(op: str, nbytes: float, world: int) -> tuple[float, float]:
    """collective_terms of gloo; the bytes include waits."""
    if op == "reduce_scatter":  # an all-reduce
        return 2.0 * (world - 1), all_reduce_wire_bytes(nbytes, world)
    if op == "reduce":  # a reduce-scatter, then the sums are sent to the root
        whole, reduced = all_reduce_wire_bytes(nbytes, world), gloo_reduce_wire_bytes(nbytes, world)
        return 2.0 * (world - 1), max(whole, reduced)
    if op == "broadcast":
        # To all children in the binomial tree at once: the next level waits for all.
        levels = math.ceil(math.log2(world))
        return float(levels), levels * (levels + 1) / 2 * nbytes
    # all_to_all: all n - 1 messages of S/n start together. But gloo announces that it is ready to
    # receive on the connection that carries data the other way, and waiting for that adds n/2
    # messages, averaged over all orders.
    messages = float(world - 1 + world // 2)
    return messages, messages * nbytes / world


@dataclass(frozen=True)
class AlphaBeta:
    latency_s: float  #: alpha, of one message
    bandwidth_bytes_s: float  #: 1 / beta, of one rank in one direction

    def seconds(self, op: str, nbytes: float, world: int) -> float:
        messages, busiest_bytes = collective_terms(op, nbytes, world)
        return messages * self.latency_s + busiest_bytes / self.bandwidth_bytes_s


def fit_alpha_beta(
    nbytes: Sequence[float], seconds: Sequence[float], op: str, world: int
) -> AlphaBeta:
    """Fit a link to measured (nbytes, seconds) of one collective.

    Least squares of the relative error, so that small messages count as much as large ones. If
    noise makes the fitted latency negative, it is 0.
    """
    # Normal equations of the rows messages alpha + bytes beta = seconds, each over its seconds
    terms = [collective_terms(op, n, world) for n in nbytes]
    rows = [
        (messages / s, busiest / s) for (messages, busiest), s in zip(terms, seconds, strict=True)
    ]
    mm, mb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * bb - mb * mb
    alpha = beta = 0.0
    if determinant:
        alpha, beta = (m * bb - b * mb) / determinant, (b * mm - m * mb) / determinant
    if alpha < 0:
        alpha, beta = 0.0, b / bb
    if beta <= 0:
        raise ConfigError("the times do not grow with the message size: measure larger messages")
    return AlphaBeta(alpha, 1 / beta)
