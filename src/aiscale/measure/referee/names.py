"""Finds out, from initial values, which tensors of the whole model a rank has.

A pipeline made of slices of a Sequential counts its layers from 0 on each stage; tensor parallelism
by hand has slices with no mark on them. Their values tell: a weight that has another value than its
namesake on one rank, but that of another weight there, is that weight; one that is shorter in one
dim is the slice that it equals."""

from __future__ import annotations

import hashlib

import torch

from aiscale.measure.referee.trace import bytes_of

_KINDS = ("weights", "buffers", "local", "before_clip", "grad", "states")


def match(many: list[dict], one: list[dict]) -> None:
    """Rename and place the pieces of `many` as they are in the whole model."""
    if not one[0]["steps"]:
        return
    reference = one[0]["steps"][0]["weights"]
    known = _by_value(reference)
    for trace in many:
        if not trace["steps"]:
            continue
        _rename(trace, _new_names(trace["steps"][0]["weights"], reference, known))
        _place(trace, reference)


def _by_value(weights: dict) -> dict[str, str]:
    """Fingerprint -> name, of weights that are no constants and that no other weight equals."""
    names: dict[str, list[str]] = {}
    for name, piece in weights.items():
        if not _is_constant(piece["values"]):
            names.setdefault(_fingerprint(piece), []).append(name)
    return {print_: same[0] for print_, same in names.items() if len(same) == 1}


def _is_constant(values: torch.Tensor) -> bool:
    return not values.numel() or bool((values == values.flatten()[0]).all())


def _fingerprint(piece: dict) -> str:
    digest = hashlib.sha1(str(piece["shape"]).encode())
    digest.update(bytes_of(piece["values"]))
    return digest.hexdigest()


def _equal(piece: dict, other: dict) -> bool:
    return piece["shape"] == other["shape"] and torch.equal(piece["values"], other["values"])


def _new_names(weights: dict, reference: dict, known: dict[str, str]) -> dict[str, str]:
    """Beginnings of names, ending with a dot -> what they are in the whole model."""
    pairs = {}
    for name, piece in weights.items():
        if name not in reference or not _equal(piece, reference[name]):
            target = known.get(_fingerprint(piece))
            if target is not None:
                pairs[name] = target
    if set(pairs) == set(pairs.values()):
        return {}  # weights that have changed places are a fault
    beginnings = {}
    for name, target in pairs.items():
        beginnings |= _shifted(name, target, weights) or {_parent(name): _parent(target)}
    return beginnings


def _parent(name: str) -> str:
    return name.rpartition(".")[0] + "."


def _shifted(name: str, target: str, weights: dict) -> dict[str, str]:
    """If both names differ in one number: the same shift for all its siblings, constants among
    them."""
    mine, theirs = name.split("."), target.split(".")
    if len(mine) != len(theirs):
        return {}
    places = [place for place, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    if len(places) != 1 or not mine[places[0]].isdigit() or not theirs[places[0]].isdigit():
        return {}
    depth, shift = places[0], int(theirs[places[0]]) - int(mine[places[0]])
    found = {}
    for sibling in weights:
        parts = sibling.split(".")
        if parts[:depth] == mine[:depth] and len(parts) > depth and parts[depth].isdigit():
            whole = [*parts[:depth], str(int(parts[depth]) + shift)]
            found[".".join(parts[: depth + 1]) + "."] = ".".join(whole) + "."
    return found


def _rename(trace: dict, beginnings: dict[str, str]) -> None:
    if not beginnings:
        return

    def renamed(name: str) -> str:
        for old in sorted(beginnings, key=len, reverse=True):
            if f"{name}.".startswith(old):
                return (beginnings[old] + f"{name}."[len(old) :]).rstrip(".")
        return name

    for step in trace["steps"]:
        for kind in _KINDS:
            step[kind] = {renamed(name): piece for name, piece in step[kind].items()}
        for call in step["calls"]:
            call["activations"] = [
                (renamed(name), kind, rows) for name, kind, rows in call["activations"]
            ]
    trace["modules"] = sorted({renamed(name) for name in trace["modules"]})
    trace["tied"] = [[renamed(name) for name in names] for names in trace["tied"]]


def _place(trace: dict, reference: dict) -> None:
    """Give slices their places; one that equals no slice is left out, and so not compared."""
    weights = trace["steps"][0]["weights"]
    short = {}
    for name, piece in weights.items():
        right = reference.get(name)
        if right and piece["size"] == piece["shape"] != right["shape"]:
            short[name] = _slices(piece, right)
    if not short:
        return
    clear = {
        (len(every), every.index(True)) for every, _ in short.values() if every.count(True) == 1
    }
    for name, (every, dim) in short.items():
        places = [place for place, fits in enumerate(every) if fits]
        if len(places) > 1:  # a constant: it lies where this rank's other slices lie
            places = [place for place in places if (len(every), place) in clear]
        _put(trace, name, reference[name]["shape"], dim, places[0] if len(places) == 1 else None)


def _slices(piece: dict, right: dict) -> tuple[list[bool], int]:
    """(for each slice of the whole, whether it is this piece; the dim that is cut)"""
    mine, whole = piece["shape"], right["shape"]
    if len(mine) != len(whole) or tuple(right["values"].shape) != tuple(whole):
        return [], 0
    cut = [dim for dim in range(len(whole)) if mine[dim] != whole[dim]]
    if len(cut) != 1 or not mine[cut[0]] or whole[cut[0]] % mine[cut[0]]:
        return [], 0
    dim = cut[0]
    parts = right["values"].split(mine[dim], dim)
    return [torch.equal(part, piece["values"]) for part in parts], dim


def _put(trace: dict, name: str, shape: tuple, dim: int, place: int | None) -> None:
    trace["has_slices"] = True
    for step in trace["steps"]:
        for kind in _KINDS:
            piece = step[kind].get(name)
            if piece is None:
                continue
            if place is None:
                del step[kind][name]
                continue
            at = [0] * len(shape)
            at[dim] = place * piece["size"][dim]
            piece |= {"shape": tuple(shape), "at": tuple(at)}
