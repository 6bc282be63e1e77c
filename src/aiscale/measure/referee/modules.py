"""Watches models: which samples a call computes, and what each module puts out for each sample.

B samples of a call. An activation is kept if its first dim is B, or its second, as in Megatron's
(T, B, D). An input may be (B, T) or (T, B), as torch's recurrent modules take it: the hashes of its
columns are kept too, and `samples` finds out which of both are samples."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch.distributed.tensor import DTensor

from aiscale.measure.referee import trace
from aiscale.measure.referee.gradients import watch_parameter
from aiscale.measure.referee.recorder import Recorder, clean

PLACE = "in the module "  #: begins a note on an error


def tensors_in(given) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts; of a DTensor, what this rank has."""
    if isinstance(given, DTensor):
        return [given.to_local()]
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, dict):
        given = list(given.values())
    if not isinstance(given, list | tuple):
        return []
    found = []
    for each in given:
        found += tensors_in(each)
    return found


def hashes_of_rows(tensor: torch.Tensor) -> list[str]:
    rows = tensor.detach().cpu()
    if not rows.dim():
        return []
    return [_hash(row) for row in rows]


def _hash(row: torch.Tensor) -> str:
    return hashlib.sha1(trace.bytes_of(row)).hexdigest()[:12]


def is_plain_float(output) -> bool:
    is_tensor = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
    return is_tensor and output.is_floating_point()


class Watcher:
    """Stands in for `nn.Module.__call__`."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.original = torch.nn.Module.__call__
        self.running: list[torch.nn.Module] = []
        self.call: dict = {}

    def install(self) -> None:
        watcher = self

        def call(module, *args, **kwargs):
            return watcher.called(module, args, kwargs)

        torch.nn.Module.__call__ = call

    def called(self, module, args, kwargs):
        recomputed = torch._C._current_graph_task_id() != -1  # by checkpointing, in a backward pass
        no_model = not self.running and next(module.parameters(), None) is None
        if recomputed:  # with as many operations as the first time: torch counts what is saved
            return self._with_noise(module, self.original(module, *args, **kwargs))
        if no_model or not torch.is_grad_enabled():
            return self.original(module, *args, **kwargs)
        if not self.running:
            self._begin(module, args, kwargs)
        self._watch_gathered(module)
        self.running.append(module)
        try:
            output = self._with_noise(module, self.original(module, *args, **kwargs))
            self._keep(module, output)
            return output
        except Exception as error:
            self._note_place(error, module, args)
            raise
        finally:
            self.running.pop()

    def _note_place(self, error: Exception, module, args) -> None:
        """Beside the error, for `runs`: the innermost module in which it came up, and shapes."""
        name = self.recorder.modules.get(id(module))
        if not name or getattr(error, "__notes__", None):
            return
        shapes = [str(tuple(each.shape)) for each in tensors_in(args)[:1]]
        weight = getattr(module, "weight", None)
        told = [f"its input is {shape}" for shape in shapes]
        if isinstance(weight, torch.Tensor):
            told += [
                f"its weight on this rank is {tuple(each.shape)}" for each in tensors_in(weight)
            ]
        error.add_note(f"{PLACE}{name} ({type(module).__name__}): {', '.join(told)}")

    def _with_noise(self, module, output):
        """In the reference with rounding noise: errors in what a module without parts puts out."""
        if self.recorder.noise and is_plain_float(output) and not module._modules:
            return self.recorder.with_rounding(output)
        return output

    def _begin(self, root, args, kwargs) -> None:
        """The training loop calls a model."""
        if id(root) not in self.recorder.roots:
            self._register(root)
        self.recorder.model_called()
        given = tensors_in([args, kwargs])
        key = _what_tells_samples_apart(given)
        rows = [] if key is None else hashes_of_rows(key)
        length = key.shape[1] if key is not None and key.dim() > 1 else None
        columns = hashes_of_rows(key.transpose(0, 1)) if length is not None else []
        self.call = {
            "rows": rows,
            "columns": columns,
            "length": length,
            "activations": [],
            "out": [],
            "used": False,
        }
        self.recorder.step["calls"].append(self.call)

    def _register(self, root) -> None:
        recorder, first = self.recorder, not self.recorder.roots
        recorder.roots.add(id(root))
        recorder.alive.append(root)
        layers = _layers_of_megatron(root)
        prefix = self._prefix(root)
        for name, module in root.named_modules(remove_duplicate=False):
            recorder.modules.setdefault(id(module), _full(name, layers, prefix))
        names: dict[int, list[str]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            name = _full(name, layers, prefix)
            names.setdefault(id(parameter), []).append(name)
            recorder.parameters.append((name, parameter))
            watch_parameter(recorder, parameter, name)
        recorder.tied += [each for each in names.values() if len(each) > 1]
        for name, buffer in root.named_buffers():
            recorder.buffers.append((_full(name, layers, prefix), buffer))
        if first and recorder.given_weights:
            _copy(recorder.given_weights, recorder.parameters)

    def _prefix(self, root) -> str:
        """What the names of a further model begin with, if the first one has the same names for
        other tensors."""
        known = dict(self.recorder.parameters)
        for name, parameter in root.named_parameters():
            if known.get(clean(name), parameter) is not parameter:
                return f"model{len(self.recorder.roots)}"
        return ""

    def _watch_gathered(self, module) -> None:
        """FSDP puts whole parameters into a module only while it runs; a parent may use those of
        its children."""
        name = self.recorder.modules.get(id(module))
        if name is None:
            return
        for path, each in [("", module), *module.named_children()]:
            for key, parameter in each._parameters.items():
                parts = [part for part in (name, path, key) if part]
                watch_parameter(self.recorder, parameter, clean(".".join(parts)))

    def _keep(self, module, output) -> None:
        name = self.recorder.modules.get(id(module))
        for tensor in tensors_in(output)[:2]:
            if tensor.dtype in (torch.bfloat16, torch.float16):
                self.recorder.notes.add("half precision")
            rows = self._by_sample(tensor) if tensor.is_floating_point() else None
            if rows is not None and name is not None:
                self.call["activations"].append((name, type(module).__name__, rows))
                break
        if len(self.running) == 1:
            self._keep_result(output)

    def _keep_result(self, output) -> None:
        """A call counts if a gradient comes back to it: libraries also try shapes out."""
        call = self.call

        def used(_):
            call["used"] = True

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(used)
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(call["rows"]):
                call["out"] = hashes_of_rows(tensor)

    def _by_sample(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The activation with samples as its first dim; None if it has no such dim."""
        samples, length = len(self.call["rows"]), self.call["length"]
        if not samples or not tensor.dim():
            return None
        if "megatron.core" in sys.modules and tensor.dim() > 2:
            if length == samples or tensor.shape[:2] != (length, samples):
                return None
            tensor = tensor.transpose(0, 1)
        if len(tensor) != samples:
            return None
        if tensor[0].numel() > trace.WHOLE_ROW:
            return trace.sketch_rows(trace.wide(tensor))
        return trace.wide(tensor)


def _what_tells_samples_apart(given: list[torch.Tensor]) -> torch.Tensor | None:
    """Tokens, if there are any, else the first tensor."""
    candidates = [tensor for tensor in given if tensor.dim()]
    for tensor in candidates:
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return tensor
    return candidates[0] if candidates else None


def _layers_of_megatron(root) -> dict[str, str]:
    """Names of layers, as a pipeline stage counts them and as the whole model does."""
    numbers = {}
    for name, module in root.named_modules():
        parent, _, last = clean(name).rpartition(".")
        if last.isdigit() and isinstance(getattr(module, "layer_number", None), int):
            numbers[f"{clean(name)}."] = f"{parent}.{module.layer_number - 1}."
    return numbers


def _full(name: str, layers: dict[str, str], prefix: str) -> str:
    name = f"{clean(name)}."
    for local, whole in layers.items():
        if name.startswith(local):
            name = whole + name[len(local) :]
            break
    return f"{prefix}.{name}".strip(".")


def _copy(given: dict, parameters: list[tuple[str, torch.Tensor]]) -> None:
    for name, parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name in given and given[name].shape == local.shape:
            local.data.copy_(given[name])
