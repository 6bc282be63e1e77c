"""The planner's page: in a browser it says what the command line says, and asks no other host."""

from __future__ import annotations

import json
import shutil

import pytest

from aiscale.cli import main
from aiscale.plan import browser
from browser import Browser, find_browser, served

FORGE = ("--model", "forge-m", "--machine", "frontier", "--nodes", "64")


def test_the_page_offers_only_what_can_be_planned():
    known = json.loads(browser.choices())
    assert {"gpt3-175b", "forge-m"} <= set(known["models"]) and "frontier" in known["machines"]
    for model in known["models"]:
        for machine in ("perlmutter", "dgx-h100"):
            answer = json.loads(
                browser.ask("--model", model, "--machine", machine, "--nodes", "1", "--batch", "64")
            )
            assert "step_time_s" in answer or "it would fit with" in answer["error"], (
                model,
                machine,
                answer,
            )


def test_a_row_of_the_ranking_can_be_asked_for_again():
    best = json.loads(browser.ask(*FORGE))
    for row in (best, *best["next"]):
        again = json.loads(browser.ask(*FORGE, "--layout", row["option"]))
        assert (again["step_time_s"], again["memory_GB"]) == (
            row["step_time_s"],
            row["memory_GB"],
        ), row["option"]


@pytest.mark.extended
@pytest.mark.skipif(
    not find_browser() or not shutil.which("npm"), reason="no chromium or no npm on this machine"
)
def test_in_a_browser_the_numbers_are_those_of_the_command_line(tmp_path, capsys):
    assert main(["plan", "--page", str(tmp_path / "page")]) == 0
    capsys.readouterr()
    with served(tmp_path / "page") as address, Browser(tmp_path) as opened:
        page = opened.page()
        page.goto(f"{address}/")
        page.wait("document.body.dataset.ready", timeout_s=240)
        shown = [_shown(page)]
        page.evaluate("document.querySelectorAll('#ranking button')[3].click()")
        shown.append(_shown(page))
        page.evaluate(_slide("tp", 3))
        shown.append(_shown(page))
        page.evaluate(_slide("nodes", 2))
        shown.append(_shown(page))
        hosts = page.evaluate(
            "performance.getEntriesByType('resource').map(entry => new URL(entry.name).host)"
        )
        broken = page.evaluate("document.body.innerText.match(/NaN|undefined|Infinity/)")
    assert {f"http://{host}" for host in hosts} == {address} and broken is None
    assert len({json.dumps(plan) for _, plan in shown}) == 4, "each change shows"
    for argv, plan in shown:
        main(["plan", *argv, "--json"])
        assert plan == json.loads(capsys.readouterr().out), argv


def _shown(page) -> tuple[list[str], dict]:
    data = page.evaluate("({argv: document.body.dataset.argv, plan: document.body.dataset.plan})")
    return json.loads(data["argv"]), json.loads(data["plan"])


def _slide(name: str, steps: int) -> str:
    """JavaScript that moves a slider to its `steps`-th value, as a person would."""
    slider = f"document.getElementById('{name}')"
    return (
        f"{slider}.value = {steps}; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
