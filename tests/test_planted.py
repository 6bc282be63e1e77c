"""The table of planted faults fits the tree; its program tells seen faults from unseen ones."""

from __future__ import annotations

import re
import subprocess

import planted

TABLE = """
least_seen_pct = {least_seen_pct}
[[fault]]
name = "half"
file = "src/half.py"
right = "x / 2"
wrong = "x / 3"
test = "test_half.py::test_half"
[[fault]]
name = "zero"
file = "src/half.py"
right = "if x else 0"
wrong = "if x else 1"
test = "test_half.py::test_half"
"""
FILES = {
    "src/half.py": "def half(x):\n    return x / 2 if x else 0\n",
    "tests/test_half.py": "from half import half\ndef test_half():\n    assert half(4) == 2\n",
    "pytest.ini": "",
}


def test_each_text_is_in_its_file_once_and_each_test_exists():
    _, faults = planted.read_table()
    places = [(fault.file, fault.name) for fault in faults]
    assert len(set(places)) == len(places) > 40
    for fault in faults:
        assert fault.times_found(planted.ROOT) == 1 and fault.wrong != fault.right, fault.name
        file, name = re.fullmatch(r"(\w+\.py)::(\w+)(?:\[.*\])?", fault.test).groups()
        text = (planted.ROOT / "tests" / file).read_text()
        assert f"def {name}(" in text, fault.test


def test_the_share_of_faults_that_are_seen_decides(tmp_path, monkeypatch, capsys):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(planted, "ROOT", tmp_path)
    monkeypatch.setattr(planted, "TABLE", tmp_path / "planted.toml")
    (tmp_path / "planted.toml").write_text(TABLE.format(least_seen_pct=50))
    assert planted.main([]) == 0
    said = capsys.readouterr().out
    assert "red    src/half.py: half\n" in said and "UNSEEN src/half.py: zero\n" in said
    assert "1 of 2 faults were seen, 50 %" in said
    (tmp_path / "planted.toml").write_text(TABLE.format(least_seen_pct=51))
    assert planted.main(["zero"]) == 1
    (tmp_path / "planted.toml").write_text(
        TABLE.replace("x / 2", "x // 2").format(least_seen_pct=0)
    )
    assert planted.main(["half"]) == 1
    assert "lost   src/half.py: half: the text is there 0 times" in capsys.readouterr().out
