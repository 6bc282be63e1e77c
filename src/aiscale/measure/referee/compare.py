"""Finds the first place where the traces of N ranks part from those of one rank.

    verdict = compare(many, one, noisy)

Nothing is compared with a fixed band: `noisy` is the same run on one rank with errors as large as
rounding. What they change, times FACTOR, is what rounding explains. A step is read in its order:
weights, samples, activations, loss, gradients, learning rate, the optimizer's states, the next
weights."""

from __future__ import annotations

from aiscale.measure.referee import backward, forward, habits, names, order, samples
from aiscale.measure.referee.step import Step
from aiscale.measure.referee.verdict import Part, Verdict


def compare(many: list[dict], one: list[dict], noisy: list[dict], resumed: bool = False) -> Verdict:
    verdict = Verdict(ranks=len(many))
    complete = min(len(trace["steps"]) for trace in many + one + noisy) - 1
    wrong = None if resumed else order.first_difference(many, one)
    if wrong:
        verdict.first = wrong
        return verdict
    if not resumed:
        names.match(many, one)
    dim = samples.dim_of_samples(many, one) if complete > 0 else 0
    for number in range(complete):
        step = Step(number, many, one, noisy, verdict, resumed, dim)
        parts = _parts_of(step)
        verdict.steps = number + 1
        if parts:
            _decide(verdict, parts)
            break
        if step.choices:
            verdict.not_compared.append(
                f"steps after step {number}: a choice was turned by rounding"
            )
            break
    if not resumed and complete > 0:
        habits.look(many, one, verdict, dim)
    if not verdict.first and not (verdict.compared["gradients"] or verdict.compared["updates"]):
        verdict.unknown = "no gradient and no update could be compared"
    is_half = any("half precision" in trace["notes"] for trace in one)
    if is_half and verdict.first and verdict.first.size is not None and verdict.first.size < 0.1:
        verdict.unknown = "in half precision so small a difference may be rounding"
    _tell_what_was_not_seen(many, one, verdict)
    return verdict


def _decide(verdict: Verdict, parts: list[Part]) -> None:
    """What follows from other inputs tells nothing, unless it is a fault without a look at one
    rank."""
    if parts[0].is_input and len(parts) > 1:
        verdict.given.append(parts.pop(0))
    verdict.first, verdict.then = parts[0], parts[1:4]
    if parts[0].is_input:
        verdict.unknown = f"the runs were given different {parts[0].what}"


def _parts_of(step: Step) -> list[Part]:
    """All differences of a step, in its order."""
    inputs = forward.initial_weights(step) + forward.samples_read(step)
    if inputs and inputs[0].is_input:
        return inputs[:1] + backward.copies(step)
    ahead, loss = forward.activations(step), forward.loss(step)
    back = backward.gradients(step) + backward.learning_rate(step) + backward.states(step)
    after = backward.next_weights(step)
    if not backward.most_agree(step):
        ahead, loss = ahead + loss, []
    for part in loss:  # such as the part of the loss that each rank has of a sequence
        words = f"loss: {part.where}; most gradients agree all the same"
        step.verdict.not_compared.append(words)
    if ahead and not (inputs or back or after):
        # Gradients and weights agree: what differs is not used, or is no row of a sample.
        for part in ahead:
            step.verdict.not_compared.append(
                f"{part.what} of {part.where}: differs, yet no gradient does"
            )
        ahead = []
    return inputs + ahead + back + after


def _tell_what_was_not_seen(many: list[dict], one: list[dict], verdict: Verdict) -> None:
    notes = {note for trace in many + one for note in trace["notes"]}
    unseen = sorted({name for trace in many for name in trace["unseen"]})
    if unseen and not any(step["grad"] for trace in many for step in trace["steps"]):
        words = f"gradients: {', '.join(unseen)} has tensors of its own; its updates are compared"
        verdict.not_compared.append(f"{words}, within the rounding of fp32")
    if not verdict.first:
        for kind in ("samples", "activations", "loss"):
            if not verdict.compared[kind]:
                verdict.not_compared.append(f"{kind}: none was seen on both sides")
    if "dropout" in notes:
        verdict.not_compared.append(
            "dropout: left out of all runs; of its masks only the generators are compared"
        )
    if "compiled" in notes:
        verdict.not_compared.append("compiled code: run without torch.compile")
