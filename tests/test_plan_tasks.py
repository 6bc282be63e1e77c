"""The six tasks of the planner's page: each can be won, is not won at its start, and is played."""

from __future__ import annotations

import json
import shutil

import pytest

from aiscale.cli import main
from aiscale.plan import browser
from aiscale.plan.tasks import TASKS
from browser import Browser, find_browser, served

#: One solution of each task, as a person sets the page's controls.
SOLUTIONS = {
    "fit": {"tp": 8, "pp": 4, "micro_batch": 1, "states": "zero_stage=1", "recompute": "none"},
    "headroom": {"tp": 4, "pp": 2, "micro_batch": 4, "states": "zero_stage=1"},
    "experts": {"tp": 2, "pp": 2, "ep": 8, "states": "zero_stage=1"},
    "budget": {"nodes": 256, "batch": 1024},
    "month": {"tp": 4, "pp": 16, "states": "zero_stage=1"},
    "lost-node": {"tp": 8, "pp": 1, "micro_batch": 8, "states": "zero_stage=0"},
}
#: {task: a plan that looks right, and the end of the rule that refuses it}
NEARLY = {
    "headroom": ({"states": "fsdp=True", "micro_batch": 4}, "upper end of its range, too"),
    "budget": ({"nodes": 512, "batch": 1024}, "node-hours"),
    "lost-node": ({"tp": 4, "pp": 4, "micro_batch": 2, "states": "zero_stage=0"}, "the lost one"),
}


def plan(name: str, settings: dict) -> dict:
    """What the page asks for these settings of a task; all others are as the task begins."""
    task = TASKS[name]
    given = {"nodes": task.nodes, "batch": task.batch} | settings
    argv = ["--model", task.model, "--machine", task.machine, "--tokens", str(task.tokens)]
    argv += ["--nodes", str(given["nodes"]), "--batch", str(given["batch"])]
    argv += ["--seq", str(task.seq)] if task.seq else []
    if "layout" in task.free:
        words = [f"{key}={given.get(key, 1)}" for key in ("tp", "pp", "ep", "micro_batch")]
        words += [given.get("states", "zero_stage=0")]
        words += [f"recompute={given.get('recompute', 'none')}"]
        words += ["sequence_parallel=True"] if given.get("tp", 1) > 1 else []
        argv += ["--layout", ",".join(words)]
    return json.loads(browser.ask(*argv))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_can_be_won_and_is_not_won_when_it_begins(name):
    solved = json.loads(browser.judge(name, json.dumps(plan(name, SOLUTIONS[name]))))
    assert all(met for _, met, _ in solved), solved
    began = json.loads(browser.judge(name, json.dumps(plan(name, {}))))
    assert not all(met for _, met, _ in began), began


@pytest.mark.parametrize("name", NEARLY)
def test_a_plan_that_misses_one_rule_is_refused_by_that_rule(name):
    settings, rule = NEARLY[name]
    judged = TASKS[name].judge(plan(name, settings))
    assert [says for says, met, _ in judged if not met and says.endswith(rule)], judged


@pytest.mark.extended
@pytest.mark.skipif(
    not find_browser() or not shutil.which("npm"), reason="no chromium or no npm on this machine"
)
def test_in_a_browser_a_person_plays_all_six_and_the_page_remembers(tmp_path, capsys):
    assert main(["plan", "--page", str(tmp_path / "page")]) == 0
    capsys.readouterr()
    with served(tmp_path / "page") as address, Browser(tmp_path) as opened:
        page = opened.page()
        page.goto(f"{address}/#task=fit")
        page.wait("document.body.dataset.ready", timeout_s=240)
        for name, settings in SOLUTIONS.items():
            page.evaluate(f"document.querySelector('[data-task={name}]').click()")
            assert not page.evaluate("document.getElementById('won').textContent"), name
            for control, value in settings.items():
                page.evaluate(_set(control, value))
            rules = page.evaluate("document.getElementById('rules').innerText")
            assert page.evaluate("document.getElementById('won').textContent"), (name, rules)
        page.goto("about:blank")
        page.goto(f"{address}/")
        page.wait("document.body.dataset.ready", timeout_s=240)
        assert page.evaluate("document.getElementById('list').innerText").count("✓") == len(TASKS)
        hosts = page.evaluate(
            "performance.getEntriesByType('resource').map(entry => new URL(entry.name).host)"
        )
    assert {f"http://{host}" for host in hosts} == {address}


def _set(control: str, value: int | str) -> str:
    """JavaScript that sets a control as a person would; a locked one stays as it is."""
    index = f"lists_of.{control}.indexOf({json.dumps(value)})"
    moved = json.dumps(value) if isinstance(value, str) else index
    return (
        f"(() => {{ const control = document.getElementById('{control}');"
        f" if (control.disabled) throw new Error('{control} is locked');"
        f" const lists_of = JSON.parse(document.body.dataset.lists);"
        f" control.value = {moved};"
        f" control.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
    )
