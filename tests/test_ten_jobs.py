"""The ten jobs of lesson 13 and its frameworks of today: layouts hold, sources are named."""

from __future__ import annotations

import re

import pytest
from instruments import jobs

from aiscale.plan import published

TEN = jobs.ten()
TODAY = published.facts("frameworks_today")["frameworks"]


@pytest.mark.parametrize("number", TEN)
def test_a_public_layout_fits_its_devices_and_names_its_source(number):
    job = TEN[number]
    chosen = jobs.in_public(job)
    assert jobs.faults(job, chosen) == []
    assert 0 < jobs.states_GB(job, chosen) < job["memory_GB"]
    assert re.search(r"arXiv:|github\.com/", job["public"]["source"])
    assert job["public"]["verification"].startswith(("primary", "secondary"))


def test_states_are_those_of_lesson_04():
    job = {"devices": 64, "parameters_B": 7.5}
    held = {shares: jobs.states_GB(job, jobs.Choice("", shares=shares)) for shares in jobs.DIVIDED}
    # figure 1 of the ZeRO paper: 120, 31.4, 16.6 and 1.9 GB
    assert [round(GB, 1) for GB in held.values()] == [120.0, 31.4, 16.6, 1.9]


def test_experts_are_divided_by_ep_and_their_states_by_their_own_copies():
    job = {"devices": 64, "parameters_B": 80, "experts_B": 64}
    whole = jobs.Choice("", ep=8, shares="nothing")
    zero1 = jobs.Choice("", ep=8, shares="optimizer states")
    assert jobs.states_GB(job, whole) == 16 * (80 - 64) + 16 * 64 / 8
    # the rest on 64 ranks, an expert's copies on 8
    assert jobs.states_GB(job, zero1) == 16 * (4 + 12 / 64) + 8 * (4 + 12 / 8)


BAD = {
    "does not divide": (5, jobs.Choice("", tp=8, pp=3)),
    "crosses nodes of 4": (5, jobs.Choice("", tp=8, pp=8, shares="optimizer states")),
    "do not fit 80 GB": (6, jobs.Choice("", tp=8)),
    "a stage needs one": (4, jobs.Choice("", pp=48)),
    "has no experts": (7, jobs.Choice("", tp=8, pp=16, ep=8, shares="optimizer states")),
    "for every micro-batch": (7, jobs.Choice("", tp=8, pp=16, shares="everything")),
    "crosses the internet": (9, jobs.Choice("", shares="everything")),
    "must divide it": (3, jobs.Choice("", shares="everything", over=48)),
}


@pytest.mark.parametrize("part", BAD)
def test_what_speaks_against_a_layout_is_said(part):
    number, choice = BAD[part]
    assert part in " ".join(jobs.faults(TEN[number], choice))
    assert part in jobs.compared(TEN, {number: choice}).data


def test_an_unknown_word_for_what_is_divided_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="shares is 'ZeRO-1': take one of 'nothing', 'optimizer"):
        jobs.Choice("torchtitan", shares="ZeRO-1")


def test_cards_do_not_name_what_was_chosen():
    shown = jobs.cards(TEN).data
    for job in TEN.values():
        public = job["public"]
        names = {public["who"].split(",")[0], public["framework"].split(",")[0].split(" (")[0]}
        assert not [name for name in names - {"their own"} if name in shown]


@pytest.mark.parametrize("entry", TODAY, ids=lambda entry: entry["name"])
def test_a_framework_of_today_has_a_dated_release_and_a_line_that_starts_it(entry):
    assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", entry["release"]["date"]) and entry["start_from"]
    assert entry["repository"].startswith("github.com/") and re.fullmatch(
        r"[0-9a-f]{12}", entry["read_at"]
    )
    assert "|" not in entry["for"] + entry["start"], "it is a cell of a table"
