"""What benchmarks/radius.py stored, drawn and tabled beside what Radius's authors published."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from instruments import radius_plots

from aiscale.errors import ConfigError
from aiscale.plan import published
from ranks import script

RESULTS = published.measured("radius_cpu")


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def rows(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines()]


def test_the_published_table_stands_beside_our_columns():
    head, _, dense, *radius = rows(published.radius_beside_ours(RESULTS))
    assert {len(row) for row in (head, dense, *radius)} == {8}
    # the artifact's table 2
    assert radius[2][:6] == ["Radius, d 0.4", "200", "5.43", "15.7%", "11.41", "-0.1%"]
    # of which we have no run
    assert radius[3][:2] == ["Radius, d 0.4", "400"] and radius[3][6:] == ["", ""]


def test_both_columns_of_time_are_shares_of_the_dense_time_that_is_saved():
    _, _, dense, *radius = rows(published.radius_beside_ours(RESULTS))
    step_s = {row["name"]: row["step_s"]["median"] for row in RESULTS["speed"]["rows"]}
    dense_s = step_s["dense, fp32, at once"]
    for name, _, days, theirs, _, _, ours, _ in radius:
        assert theirs == f"{1 - float(days) / float(dense[2]):.1%}"
        if ours:
            sparse_s = step_s[f"{name.replace('Radius,', 'radius')}, fp32, at once"]
            run_s = 0.2 * dense_s + 0.8 * sparse_s  # a fifth of the steps is dense
            assert ours == f"{1 - run_s / dense_s:.1%}"
    assert script("radius").SAVING_TARGET == 1 - float(radius[2][2]) / float(dense[2])


def test_what_lesson_08_says_of_its_search_and_of_the_papers_claims_is_what_is_stored():
    cases = {(row["case"], row["steps"]): row for row in RESULTS["sweep"]["rows"]}
    dense, radius, top_k = (
        cases[case, 2000]
        for case in ("dense", "radius d 0.4 T 200 sum switch 0.2", "top-k d 0.1 switch 0.2")
    )
    assert dense["best_at_edge"] and radius["best_at_edge"] and dense["lr"] == radius["lr"]
    assert top_k["val_ppl"]["mean"] / dense["val_ppl"]["mean"] == pytest.approx(1.01, abs=0.005)
    pair = published.measured("radius_pair")
    kept = [share for _, share in pair["mask_kept"]]
    assert (round(min(kept), 2), round(max(kept), 2)) == (0.12, 0.22)
    assert max(kept) < pair["mask_kept_by_chance"] == 0.4


def test_one_page_draws_published_and_stored_in_four_panels():
    axes = radius_plots.page(
        RESULTS, times=[(0.4, 0.8)], perplexities=[(0.41, -0.1), (0.1, 4.9)], share=0.5
    )
    assert axes.shape == (2, 2)
    hollow = [[line for line in ax.lines if line.get_label() == "_published"] for ax in axes.flat]
    assert [len(lines) for lines in hollow] == [1, 0, 1, 0]
    (arrow,) = (text.get_text() for text in axes[1, 0].texts)
    assert arrow == "↑ ours: +27 %"  # density 0.1, above the frame
    assert max(x for line in axes[1, 1].lines for x in line.get_xdata()) > 3800


def test_the_long_curves_are_of_the_longest_runs_that_all_cases_have():
    cases = {"radius d 0.4": "radius d 0.4 T 200 sum", "top-k d 0.1": "top-k d 0.1"}
    loss, _, _ = radius_plots.long_curves(RESULTS["sweep"], cases)
    assert max(line.get_xdata()[-1] for line in loss.lines) == 2000  # top-k has no longer one
    with pytest.raises(ConfigError, match="no length has runs of dense and of all of no such case"):
        radius_plots.long_curves(RESULTS["sweep"], {"x": "no such case"})
