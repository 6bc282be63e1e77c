"""Text: the embedded corpus is clean and constant, files are read in pieces, or refused."""

import re

import pytest

from aiscale.errors import ConfigError
from aiscale.train.prepare import find_text
from aiscale.train.prepare.corpus import stdlib_files


def read(corpus) -> str:
    return "".join(find_text(str(corpus)))


def test_the_standard_library_corpus_is_large_shuffled_and_without_tests_and_tables():
    files = stdlib_files()
    names = [file.name for file in files]
    assert {"argparse.py", "socket.py"} <= set(names)
    assert not any("test" in file.parts for file in files)
    assert sum(file.stat().st_size for file in files) > 8_000_000 and names != sorted(names)
    assert len(read("stdlib")) > 8_000_000


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
def test_a_binary_file_is_refused_with_the_offset_of_its_first_bad_byte(
    before, text, place, tmp_path
):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"x" * before + text)
    message = rf"latin1.txt is not UTF-8 text \(byte 0xe9 at offset {before + place}\): convert it"
    with pytest.raises(ConfigError, match=message):
        read(file)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_wide_text_is_named_and_its_remedy_restores_it(encoding, tmp_path):
    text = "Two lines: été.\nThe second.\n"
    (tmp_path / "wide.txt").write_bytes(text.encode(encoding))
    with pytest.raises(ConfigError, match="wide.txt (begins with|has .* zeros)") as error:
        read(tmp_path)
    named = re.search("iconv -f (.*?) ", str(error.value))[1]
    assert (tmp_path / "wide.txt").read_bytes().decode(named) == text


def test_links_to_files_and_folders_are_followed(tmp_path):
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    (elsewhere / "deeper").mkdir(parents=True)
    corpus.mkdir()
    (elsewhere / "deeper/two.txt").write_text("second")
    (tmp_path / "three.txt").write_text("third")
    (corpus / "a.txt").write_text("first")
    (corpus / "b").symlink_to(elsewhere)
    (corpus / "c.txt").symlink_to(tmp_path / "three.txt")
    (elsewhere / "deeper/round").symlink_to(corpus)
    (elsewhere / "round").symlink_to(elsewhere)
    assert read(corpus) == "first\nsecond\nthird"
    (corpus / "d.txt").symlink_to("gone.txt")
    with pytest.raises(ConfigError, match="d.txt is a link to gone.txt, which is not there"):
        read(corpus)


@pytest.mark.parametrize("suffix", [".jsonl", ".txt.gz", ".parquet"])
def test_records_and_packed_files_are_no_plain_text(suffix, tmp_path):
    (tmp_path / f"docs{suffix}").write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match="holds records or is packed: name plain text"):
        read(tmp_path)
