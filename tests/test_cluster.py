"""Ranks under a notebook: real engines, real notebooks, real signals."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import nbformat
import papermill
import pytest

from aiscale.lesson import cluster
from aiscale.lesson.cluster import engine, guard
from aiscale.lesson.cluster.cells import Output, Pending
from aiscale.lesson.cluster.errors import Failure, RankError, name_ranks, own_frames
from aiscale.private import STORE, new_store
from aiscale.processes import marked, usable_cores

SRC = str(Path(__file__).parents[1] / "src")


@pytest.fixture
def ranks():
    """Three ranks shared by all tests, unless one has killed or replaced them."""
    return cluster.start(3, timeout_s=20)


@pytest.fixture(scope="module", autouse=True)
def _stop():
    yield
    cluster.stop()


def own(ranks) -> tuple[str, Path]:
    """The marker of a cluster's processes, and the folder of its files."""
    return ranks.run(os.getenv, guard.MARKER)[0], Path(ranks.run(os.getenv, "IPYTHONDIR")[0]).parent


def seconds_until(condition, limit_s: float = 20.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - began


# ---- notebooks ----------------------------------------------------------------------------------

NOTEBOOK = [
    "from aiscale import cluster\nranks = cluster.start(3)",
    "%%px\nimport time; time.sleep(0.4 * (world_size - rank))\n"
    "print('hello')\nprint('from', rank)\nrank * 10",
    "%%px --targets 1:3\nprint('only', rank)",
    "%%px\nimport matplotlib.pyplot as plt\nplt.plot([0, rank])\nplt.show()",
    "%px total = torch.tensor([float(rank)]); dist.all_reduce(total); total = total.item()",
    "ranks['total'], ranks['rank'], ranks.run(lambda a: a + 1, 1)",
    "%%px --local\nhere = 'both'",
    "here, ranks['here']",
    "%autopx",
    "print('auto', rank)",
    "%autopx",
    "ranks",
    "%%px\nif rank == 1: raise ValueError('boom')\ndist.barrier()",
    "%%px\ndist.barrier()\nprint('again', total)",
    "first = ranks\nranks = cluster.start(3)\nassert ranks is first",
    "%%px\nassert 'total' not in globals()\ndist.barrier()",
    "ranks.stop()",
    "%px 1",
]
MAY_FAIL = (12, 17)


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> list[list[dict]]:
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in NOTEBOOK]
    )
    for cell in MAY_FAIL:
        notebook.cells[cell].metadata["tags"] = ["raises-exception"]
    nbformat.write(notebook, folder / "in.ipynb")
    paths = str(folder / "in.ipynb"), str(folder / "out.ipynb")
    limits = {"execution_timeout": 60, "iopub_timeout": 60}
    # only after the last cell: some may fail
    with pytest.raises(papermill.PapermillExecutionError):
        papermill.execute_notebook(*paths, kernel_name="python3", progress_bar=False, **limits)
    return [
        cell.outputs
        for cell in nbformat.read(folder / "out.ipynb", 4).cells
        if cell.cell_type == "code"
    ]


def text_of(outputs: list[dict]) -> str:
    return "\n".join(o.text if o.output_type == "stream" else o.data["text/plain"] for o in outputs)


@pytest.mark.notebook
class TestNotebook:
    def test_start_prints_one_line(self, executed):
        assert re.fullmatch(
            r"3 ranks on \S+ in \d+\.\d s \(gloo, \d+ threads? each\)\n", text_of(executed[0])
        )

    def test_text_is_labelled_and_in_rank_order_even_if_rank_0_is_last(self, executed):
        # one, updated in place
        assert [output.output_type for output in executed[1]] == ["display_data"]
        lines = [f"[rank {r}] {text}" for r in range(3) for text in ("hello", f"from {r}", r * 10)]
        assert text_of(executed[1]).splitlines() == lines

    def test_targets_are_ranks(self, executed):
        assert text_of(executed[2]) == "[rank 1] only 1\n[rank 2] only 2"

    def test_figures_of_all_ranks_appear_in_rank_order(self, executed):
        labels, figures = executed[3][::2], executed[3][1::2]
        assert [label.data["text/plain"] for label in labels] == [
            "[rank 0]",
            "[rank 1]",
            "[rank 2]",
        ]
        assert all("image/png" in figure.data for figure in figures) and len(figures) == 3

    def test_variables_and_calls_come_back_in_rank_order(self, executed):
        assert text_of(executed[5]) == "([3.0, 3.0, 3.0], [0, 1, 2], [2, 2, 2])"

    def test_local_runs_here_as_well(self, executed):
        assert text_of(executed[7]) == "('both', ['both', 'both', 'both'])"

    def test_autopx_sends_plain_cells_to_the_ranks(self, executed):
        assert text_of(executed[9]) == "[rank 0] auto 0\n[rank 1] auto 1\n[rank 2] auto 2"

    def test_ranks_say_how_they_are(self, executed):
        assert text_of(executed[11]) == "<3 ranks, running>"

    def test_a_rank_that_raises_is_stored_with_number_and_traceback(self, executed):
        (error,) = [output for output in executed[12] if output.output_type == "error"]
        assert error.ename == "RankError"
        assert error.evalue.startswith("rank 1 raised ValueError: boom")
        shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
        assert "[rank 1]" in shown and "----> 1 if rank == 1: raise ValueError('boom')" in shown

    def test_the_next_cell_works_and_keeps_the_variables(self, executed):
        assert text_of(executed[13]) == "[rank 0] again 3.0\n[rank 1] again 3.0\n[rank 2] again 3.0"

    def test_starting_again_reuses_the_processes_but_not_their_state(self, executed):
        assert "reused, with a new process group and no variables" in text_of(executed[14])
        assert executed[15] == []

    def test_stop_is_quiet_and_later_use_explains_what_to_do(self, executed):
        assert executed[16] == []
        assert (
            executed[17][0].evalue
            == "these ranks were stopped: ranks = cluster.start(3) starts new ones"
        )


# ---- failures -----------------------------------------------------------------------------------


def test_threads_share_the_cores_and_are_set_before_torch_loads(ranks):
    share = max(1, len(usable_cores()) // 3)
    ranks.execute("import os; seen = torch.get_num_threads(), os.environ['MKL_NUM_THREADS']")
    assert ranks["seen"] == [(share, str(share))] * 3


def test_forked_ranks_draw_different_random_numbers(ranks):
    ranks.execute(
        "import random, numpy, uuid\ndrawn = random.random(), numpy.random.rand(), uuid.uuid4()"
    )
    for kind in zip(*ranks["drawn"], strict=True):
        assert len(set(kind)) == 3


def test_ranks_reused_from_a_smaller_cluster_can_join_new_ones(ranks):
    """For example after a Stop interrupted some ranks while they joined.
    Ranks have joined different numbers of times."""
    rendezvous = {STORE: str(new_store())}
    first = ranks.view.client.direct_view([0, 1])
    served = first.apply_async(engine.join, rendezvous, 2, "cpu", 20, [], True).get(60)
    assert [info["rank"] for info in served] == [0, 1]
    assert cluster.start(3, timeout_s=20) is ranks
    ranks.execute("total = world.sum(1.0)")
    assert ranks["total"] == [3.0] * 3


def test_ranks_are_reused_only_by_who_asks_for_the_same(ranks, monkeypatch):
    asked = ranks._request
    joined = []
    monkeypatch.setattr(ranks, "_join", lambda fresh: joined.append(fresh))
    assert ranks._renew(3, dict(asked)) and joined == [True]
    for other in ({"threads": 7}, {"device": "cuda"}, {"timeout_s": 5.0}, {"engines": "slurm"}):
        assert not ranks._renew(3, asked | other), other
    assert not ranks._renew(2, dict(asked)) and joined == [True]


def test_ranks_whose_group_broke_join_a_new_one_and_others_keep_theirs(ranks, monkeypatch):
    monkeypatch.setattr("aiscale.lesson.cluster.ranks.GRACE_S", 30)  # all ranks end by themselves
    ranks.execute("group = dist.group.WORLD")
    of_gloo = "RuntimeError('gloo: Connection closed by peer')"
    for error, is_new in (("ValueError('mine')", False), (of_gloo, True)):
        with pytest.raises(RankError):
            ranks.execute(f"raise {error}")
        ranks.execute("is_new = dist.group.WORLD is not group")
        assert ranks["is_new"] == [is_new] * 3


def test_text_is_printed_in_rank_order_in_a_terminal_too(ranks, capfd):
    ranks.execute("import time; time.sleep(0.3 * (2 - rank)); print('a\\nb')")
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"[rank {r}] {word}" for r in range(3) for word in "ab"]


def test_one_rank_that_raises_does_not_leave_the_others_hanging(ranks):
    ranks["kept"] = 7
    began = time.monotonic()
    with pytest.raises(
        RankError, match=r"rank 2 raised KeyError: 'x' \(ranks 0-1 interrupted"
    ) as caught:
        ranks.execute("if rank == 2: {}['x']\ndist.barrier()")
    assert time.monotonic() - began < 30
    assert "if rank == 2: {}['x']" in "".join(caught.value.__notes__)
    ranks.execute("dist.barrier()")
    assert ranks["kept"] == [7, 7, 7]


def test_ranks_that_raise_the_same_are_shown_once(ranks, monkeypatch):
    # a busy machine may delay one of them
    monkeypatch.setattr("aiscale.lesson.cluster.ranks.GRACE_S", 30)
    with pytest.raises(
        RankError, match="^ranks 0-2 raised ZeroDivisionError: division by zero"
    ) as caught:
        ranks.execute("1 / 0")
    assert "".join(caught.value.__notes__).count("Traceback") == 1


def test_an_unknown_variable_is_reported_without_internal_frames(ranks, monkeypatch):
    monkeypatch.setattr("aiscale.lesson.cluster.ranks.GRACE_S", 30)
    with pytest.raises(
        RankError, match="ranks 0-2 raised NameError: name 'nothing' is not defined"
    ) as caught:
        ranks["nothing"]
    assert "kernel.py" not in "".join(caught.value.__notes__)


def test_kill_9_of_a_rank_fails_the_cell_in_seconds_and_the_next_use_starts_new_ranks(ranks, capfd):
    cluster_id, _ = own(ranks)
    killed = []

    def kill():
        killed.append(time.monotonic())
        os.kill(ranks.info[2]["pid"], signal.SIGKILL)

    ranks["kept"] = 1
    threading.Timer(0.5, kill).start()
    with pytest.raises(cluster.RankDied, match=r"^rank 2 died \(signal 9\)"):
        ranks.execute("if rank == 2: __import__('time').sleep(60)\ndist.barrier()")
    assert time.monotonic() - killed[0] < 20
    assert marked(guard.MARKER, cluster_id) == []
    assert repr(ranks) == "<3 ranks, rank 2 died (signal 9)>"
    ranks.execute("print('kept' in globals()); dist.barrier()")
    out = capfd.readouterr().out
    assert "; restarted, because rank 2 died (signal 9); their variables are lost" in out
    assert "[rank 0] False" in out


def test_a_crash_shows_where(ranks):
    with pytest.raises(cluster.RankDied, match=r"rank 1 died \(signal 11\)") as caught:
        ranks.execute("import ctypes\nif rank == 1: ctypes.string_at(0)")
    assert "Segmentation fault" in caught.value.shown and "string_at" in caught.value.shown


@pytest.mark.extended
def test_a_collective_that_hangs_ends_with_an_error():
    with cluster.start(2, timeout_s=6) as pair:
        with pytest.raises(RankError, match="Timed out waiting 6000ms"):
            pair.execute("if rank == 0: dist.barrier()\nelse: __import__('time').sleep(60)")
        pair.execute("dist.barrier()")


def test_a_failed_start_shows_the_engines_own_error(tmp_path):
    (tmp_path / "stack_data.py").write_text("raise ImportError('this module is broken')")
    program = (
        "import os; from aiscale import cluster; "
        f"os.environ['PYTHONPATH'] = '{tmp_path}:{SRC}'; cluster.start(2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert "ClusterError: the ranks did not start: rank" in done.stderr, done.stderr
    assert (
        "ended with exit status 1" in done.stderr
        and "ImportError: this module is broken" in done.stderr
    )


def test_a_start_that_times_out_says_how_many_engines_are_up():
    with pytest.raises(
        cluster.ClusterError, match="only 0 of 2 ranks were up in time: raise start_timeout_s"
    ):
        cluster.start(2, start_timeout_s=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "cluster.start(0): the number of ranks must be a whole number of at least 1"),
        ((2.0,), "cluster.start(2.0): the number of ranks must be a whole number of at least 1"),
    ],
)
def test_bad_sizes_are_refused(arguments, message):
    with pytest.raises(cluster.ClusterError, match=f"^{re.escape(message)}$"):
        cluster.start(*arguments)


# ---- Stop, and the end of the kernel ------------------------------------------------------------


class Kernel:
    """A Jupyter kernel, driven as JupyterLab does."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code: str, stop_at: str = "") -> str:
        """Run a cell and return its output; press Stop once the output contains `stop_at`."""
        request, shown, began = self.client.execute(code), [], time.monotonic()
        while True:
            if stop_at and shown[-1:] == [stop_at]:
                time.sleep(1)  # ipykernel may lose an interrupt while it sends
                self.manager.interrupt_kernel()
                stop_at = ""
            assert time.monotonic() - began < 60, f"{code} did not end"
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            content = message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "\n".join(shown)
            shown.append(
                content.get("text")
                or content.get("evalue")
                or content.get("data", {}).get("text/plain", "")
            )


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run("from aiscale import cluster\nranks = cluster.start(2)")
    yield kernel
    kernel.manager.shutdown_kernel(now=True)


BOTH_IN = "[rank 0] in\n[rank 1] in"


@pytest.mark.notebook
class TestStop:
    def test_a_loop_on_ranks_stops_and_variables_stay(self, kernel):
        kernel.run("%px kept = rank + 10")
        shown = kernel.run(
            "%%px\nimport time\nprint('in')\nwhile True: time.sleep(0.1)", stop_at=BOTH_IN
        )
        assert "ranks 0-1 interrupted" in shown
        assert kernel.run("%%px\ndist.barrier()\nprint(kept)").endswith("[rank 0] 10\n[rank 1] 11")

    def test_a_rank_that_hangs_in_a_collective_is_freed(self, kernel):
        cell = "%%px\nprint('in')\nif rank == 0: dist.barrier()\nwhile True: time.sleep(0.1)"
        assert "ranks 0-1 interrupted" in kernel.run(cell, stop_at=BOTH_IN)
        assert kernel.run("%%px\ndist.barrier()\nprint(kept)").endswith("[rank 0] 10\n[rank 1] 11")

    @pytest.mark.extended
    def test_ranks_that_do_not_answer_are_replaced(self, kernel):
        # they will not answer in time
        kernel.run("from aiscale.lesson.cluster import ranks as module; module.ANSWER_S = 3")
        shown = kernel.run("%%px\nprint('in')\ndist.recv(torch.ones(1), 1 - rank)", stop_at=BOTH_IN)
        assert (
            "ranks 0-1 did not answer and had to be killed; the next cell starts new ranks" in shown
        )
        began = time.monotonic()
        shown = kernel.run("%%px\ndist.barrier()\nprint('kept' in globals())")
        assert time.monotonic() - began < 60  # starting new ranks takes most of it
        assert "; restarted, because ranks 0-1 did not answer" in shown
        assert shown.endswith("[rank 0] False\n[rank 1] False")


def test_kill_9_of_the_kernel_leaves_nothing_behind():
    code = """
        import os, subprocess, sys, time
        from aiscale.lesson import cluster
        ranks = cluster.start(2)
        sleep = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
        ranks.execute("import subprocess; " + sleep)
        names = "AISCALE_CLUSTER", "IPYTHONDIR"
        print("READY", *(ranks.run(os.getenv, name)[0] for name in names), flush=True)
        ranks.execute("dist.recv(torch.ones(1), 1 - rank)")
    """
    kernel = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    line = next(line for line in kernel.stdout if line.startswith("READY"))
    _, cluster_id, folder = line.split()
    folder = Path(folder).parent
    # controller, the process that forks ranks, ranks, sleeps
    assert len(marked(guard.MARKER, cluster_id)) >= 6
    kernel.kill()
    kernel.wait()
    assert seconds_until(lambda: not marked(guard.MARKER, cluster_id)) < 20
    seconds_until(lambda: not folder.exists())


# ---- other people's machines --------------------------------------------------------------------


@pytest.mark.extended
def test_four_notebooks_at_once_do_not_disturb_each_other():
    code = """
        import os
        from aiscale.lesson import cluster
        with cluster.start(2) as ranks:
            total = ranks.run(
                lambda: (lambda t: (dist.all_reduce(t), t.item())[1])(torch.ones(1) * NUMBER)
            )
            folder = os.path.dirname(ranks.run(os.getenv, "IPYTHONDIR")[0])
            private = oct(os.stat(folder).st_mode & 0o777)
            print("SUM", total, private)
    """
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code.replace("NUMBER", str(n)))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(1, 5)
    ]
    for n, program in enumerate(programs, 1):
        out, _ = program.communicate(timeout=100)
        assert f"SUM [{2.0 * n}, {2.0 * n}] 0o700" in out


def test_everything_listens_on_the_loopback_only(ranks):
    import psutil

    ranks.execute("dist.barrier()")
    for pid in [os.getpid(), *marked(guard.MARKER, own(ranks)[0])]:
        for connection in psutil.Process(pid).net_connections("inet"):
            assert connection.laddr.ip.removeprefix("::ffff:").startswith("127."), connection


@pytest.mark.extended
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, to change the host name"
)
def test_a_host_name_that_does_not_resolve():
    program = (
        "from aiscale import cluster; r = cluster.start(2); "
        "r.execute('dist.barrier(); print(rank)')"
    )
    shell = 'hostname no-such-host.invalid && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--uts", "sh", "-c", shell, sys.executable, program],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "2 ranks on no-such-host.invalid" in done.stdout and "[rank 1] 1" in done.stdout, (
        done.stderr
    )


@pytest.fixture(scope="module")
def read_only(tmp_path_factory):
    """Run a program from a read-only installation, folder and home; the program just ends."""
    base = tmp_path_factory.mktemp("read_only")
    package, folder = base / "src", base / "notebooks"
    shutil.copytree(SRC, package, ignore=shutil.ignore_patterns("__pycache__"))
    folder.mkdir()
    for path in (base, *base.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    program = "import aiscale.lesson.cluster as c, os; r = c.start(2); "
    program += "r.execute('dist.barrier(); print(rank)')\n"
    program += "print(c.__file__, os.access('.', os.W_OK), os.access(c.__file__, os.W_OK))\n"
    program += "print(*(r.run(os.getenv, name)[0] for name in ('AISCALE_CLUSTER', 'IPYTHONDIR')))"
    command = [sys.executable, "-c", program]
    if os.geteuid() == 0:  # root may write anywhere, unless it drops the capability
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    env = {**os.environ, "PYTHONPATH": str(package), "HOME": str(folder), "TMPDIR": "/tmp"}
    env.pop("IPYTHONDIR", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    left = list(folder.iterdir())
    for path in (base, *base.rglob("*")):
        path.chmod(0o755)
    return done, left, package


@pytest.mark.extended
def test_an_installation_a_folder_and_a_home_that_cannot_be_written(read_only):
    done, left, package = read_only
    assert "[rank 1] 1" in done.stdout, done.stderr
    assert f"{package}/aiscale/lesson/cluster/__init__.py False False\n" in done.stdout
    assert done.stderr == "" and left == []


@pytest.mark.extended
def test_the_end_of_a_program_stops_its_ranks_and_removes_its_files(read_only):
    cluster_id, folder = read_only[0].stdout.splitlines()[-1].split()
    assert marked(guard.MARKER, cluster_id) == [] and not Path(folder).parent.exists()


# ---- small things -------------------------------------------------------------------------------


def test_of_many_nodes_four_are_named_and_the_others_counted(capsys):
    ranks = object.__new__(cluster.Ranks)
    ranks.size = 16
    ranks.info = [{"host": f"n{rank // 2}", "threads": 1, "backend": "gloo"} for rank in range(16)]
    ranks._greet(3.0)
    assert "16 ranks on n0, n1, n2, n3 and 4 more in 3.0 s" in capsys.readouterr().out


def test_ranks_are_named_as_people_do():
    assert [name_ranks(r) for r in ([2], [0, 1, 2, 3], [3, 0, 2])] == [
        "rank 2",
        "ranks 0-3",
        "ranks 0, 2-3",
    ]


def test_a_traceback_loses_only_internal_frames():
    machinery = "File /x/ipyparallel/engine/kernel.py:157, in f\n--> 1 exec\n\n"
    mine = "Cell In[1], line 1\n\nFile /mine.py:2\n"
    assert own_frames(f"Traceback\n{machinery}{mine}") == f"Traceback\n{mine}"


def test_text_may_come_after_the_answer_of_its_rank(capsys):
    children = [Future(), Future()]
    for child, text in zip(children, ("a\nb", "c"), strict=True):
        child.set_result(None)
        child.output = Future()
        child.output.metadata = {
            "stdout": text,
            "stderr": "",
            "execute_result": None,
            "outputs": [],
        }
    output = Output([0, 1], children)
    children[1].output.set_result(None)
    threading.Timer(0.1, children[0].output.set_result, (None,)).start()
    Pending(dict(enumerate(children))).await_output(lambda: False)
    assert children[0].output.done()
    output.finish()
    assert capsys.readouterr().out == "[rank 0] a\n[rank 0] b\n[rank 1] c\n"


def test_different_failures_are_all_reported():
    error = RankError.of(
        [Failure(0, "A", "x", "ta"), Failure(1, "B", "y", "tb"), Failure(2, "A", "x", "ta")], "note"
    )
    assert str(error) == "ranks 0, 2 raised A: x; rank 1 raised B: y (note)"
    assert error._render_traceback_()[:2] == ["[ranks 0, 2]", "ta"]
