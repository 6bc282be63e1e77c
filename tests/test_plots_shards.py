"""Figures of sharding draw the rows that ranks have and the memory that was measured."""

from dataclasses import dataclass

import matplotlib
import pytest

matplotlib.use("Agg")

from aiscale import plots  # noqa: E402
from aiscale.config import ConfigError  # noqa: E402
from aiscale.cost import Event, prefetch_timeline  # noqa: E402


def test_each_rank_has_its_rows_and_the_rest_is_padding():
    ax = plots.shards({"weight": (67, 8), "bias": (3,)}, 4)
    widths = [[bar.get_width() for bar in group] for group in ax.containers]
    assert widths == [[17], [17], [17], [16], [1], [1], [1], [0]]
    padding = [patch.get_width() for patch in ax.patches if patch.get_label() == "_padding"]
    assert padding == [1, 1]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["weight  (67 × 8)", "bias  (3)"]


@dataclass
class Trace:
    seconds: list
    held_bytes: dict
    events: list


def test_memory_is_stacked_in_mebibytes_and_the_strip_shows_the_blocks():
    held = {"parameters": [2**20] * 3, "activations": [0, 2**21, 0], "gathered parameters": [0, 2**20, 0]}
    trace = Trace([0.0, 0.1, 0.2], held, [Event(0, "forward 0", 0.0, 0.1, "forward")])
    axes = plots.step_memory({"a": trace, "b": trace, "c": trace})
    assert [ax.get_visible() for ax in axes.flat] == [True, True, True, False]
    ax = axes[0, 0]
    top = {layer.get_label(): layer.get_paths()[0].vertices[:, 1].max() for layer in ax.collections}
    assert (top["_parameters"], top["_gathered parameters"], top["_activations"]) == (1, 2, 4)
    (strip,) = [patch for patch in ax.patches if patch.get_width() == 100]
    assert strip.get_y() < 0
    legend = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert legend == ["parameters", "gathered parameters", "activations", "forward", "backward"]


def test_nothing_to_draw_is_said():
    with pytest.raises(ConfigError, match="no tensors"):
        plots.shards({}, 4)
    with pytest.raises(ConfigError, match="nothing to draw"):
        plots.step_memory({})


@pytest.mark.parametrize(
    ("gather_s", "block_s", "ahead", "end_s"),
    [
        (2, 3, 0, 2 + 6 * (2 + 3)),  # the root, then one after the other
        (2, 3, 1, 2 + 2 + 6 * 3),  # only the root and the first gather show
        (3, 2, 1, 3 + 6 * 3 + 2),  # the wire is never idle
        (3, 2, 2, 3 + 6 * 3 + 2),  # and further ahead changes nothing
    ],
)
def test_the_predicted_forward_pass_takes_as_long_as_its_formula_says(gather_s, block_s, ahead, end_s):
    events = prefetch_timeline(6, gather_s, block_s, ahead)
    assert max(event.end_s for event in events) == end_s
    computed = [event.name for event in events if event.kind == "forward"]
    gathered = [event.name for event in events if event.kind == "communication"]
    assert computed == [str(i) for i in range(6)] and gathered == ["root"] + [f"gather {i}" for i in range(6)]
