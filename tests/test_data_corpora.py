"""Text: the embedded corpus is clean and the same everywhere, files are read in pieces, and unreadable ones are refused
in one line.
"""

import pytest

from aiscale.config import ConfigError
from aiscale.data import find_text
from aiscale.data.corpus import stdlib_files


def read(corpus) -> str:
    return "".join(find_text(str(corpus)).pieces())


def test_the_standard_library_corpus_is_large_shuffled_and_without_tests_and_tables():
    files = stdlib_files()
    names = [file.name for file in files]
    assert {"argparse.py", "socket.py"} <= set(names) and not any("test" in file.parts for file in files)
    assert sum(file.stat().st_size for file in files) > 8_000_000 and names != sorted(names)
    assert sum(len(piece) for piece in find_text("stdlib").pieces()) > 8_000_000


def test_a_folder_is_read_in_the_order_of_its_names_and_hidden_files_are_left_out(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/one.txt").write_text("third")
    (tmp_path / "a2.txt").write_text("second")
    (tmp_path / "a1.txt").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    assert read(tmp_path) == "first\nsecond\nthird"


def test_line_ends_and_byte_order_marks_of_other_systems_do_not_become_tokens(tmp_path):
    file = tmp_path / "windows.txt"
    file.write_bytes("\ufeffone\r\ntwo\rthree\n".encode())
    assert read(file) == "one\ntwo\nthree\n"


@pytest.mark.parametrize("before", [0, 8185, 8188, 100_000])  # a stream reads 8192 bytes at a time
@pytest.mark.parametrize(("text", "place"), [(b"caf\xc3\xa9 caf\xe9 au lait", 9), (b"caf\xe9", 3)])
def test_a_binary_file_is_refused_with_the_offset_of_its_first_bad_byte(before, text, place, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"x" * before + text)
    message = rf"latin1.txt is not UTF-8 text \(byte 0xe9 at offset {before + place}\): convert it"
    with pytest.raises(ConfigError, match=message):
        read(file)
