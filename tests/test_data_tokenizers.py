"""Tokenizers lose nothing, name what they do not know, and reach other ranks unchanged."""

import json

import numpy as np
import pytest
import tokenizers

from aiscale.errors import ConfigError
from aiscale.train.prepare import Tokenizer, embedded_text, learn
from aiscale.train.prepare.tokenizers import TOKENIZERS, CharTokenizer, regroup

AWKWARD = (
    "Tabs\tand  double  spaces \n\n  a\u00a0line\r\n'quoted' don't, été 世界 👩‍🚀 "
    "<|endoftext|> _x_ 3.14\n \n"
)


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request):
    return learn(request.param, [embedded_text(), AWKWARD], bpe_vocab_size=400)


def test_decoding_gives_back_exactly_what_was_encoded(tokenizer):
    for text in (
        "",
        " ",
        "\n\n",
        AWKWARD,
        "".join(embedded_text().splitlines(keepends=True)[:50]),
        AWKWARD * 3,
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_all_tokens_are_in_the_vocabulary_and_all_kinds_have_one_interface(tokenizer):
    ids = tokenizer.encode_array(AWKWARD)
    assert ids.dtype == np.uint16 and ids.max() < tokenizer.vocab_size
    assert tokenizer.encode(AWKWARD) == ids.tolist()
    assert isinstance(tokenizer.encode(AWKWARD)[0], int)
    assert tokenizer.kind in TOKENIZERS


def test_a_tokenizer_survives_json(tokenizer):
    again = Tokenizer.from_json(tokenizer.to_json())
    assert type(again) is type(tokenizer) and again.to_json() == tokenizer.to_json()
    assert again.encode(AWKWARD) == tokenizer.encode(AWKWARD)


def test_a_vocabulary_of_more_than_two_bytes_keeps_its_last_tokens():
    large = CharTokenizer([chr(0x20000 + i) for i in range(2**16 + 2)])
    text = chr(0x20000) + chr(0x20000 + 2**16 + 1)
    assert large.encode(text) == [0, 2**16 + 1] and large.decode(large.encode_array(text)) == text


def test_ids_beyond_the_vocabulary_are_shown_as_unknown(tokenizer):
    ids = [*tokenizer.encode("One"), tokenizer.vocab_size + 5, *tokenizer.encode(" the")]
    assert tokenizer.decode(ids) == "One\ufffd the"


def test_tokenizing_in_blocks_gives_the_tokens_of_the_whole_text(tokenizer):
    text = embedded_text()[:20_000] + AWKWARD + embedded_text()[20_000:40_000]
    tokenizer = learn(tokenizer.kind, [text], bpe_vocab_size=400)
    whole = tokenizer.encode(text)
    # bpe splits long texts by itself: compare with the library on the whole text
    if tokenizer.kind == "bpe":
        library = tokenizers.Tokenizer.from_str(
            json.dumps(json.loads(tokenizer.to_json())["tokenizer"])
        )
        whole = library.encode(text, add_special_tokens=False).ids
    for size in (100, 1000, 7777):
        blocks = list(regroup([text[:333], text[333:]], size))
        assert "".join(blocks) == text and len(blocks) > 3
        assert [i for block in blocks for i in tokenizer.encode(block)] == whole


def test_an_unknown_character_is_refused_by_name():
    with pytest.raises(
        ConfigError, match="char 'z' is not among the 3 .* use tokenizer byte or bpe"
    ):
        learn("char", ["a b"]).encode("a z")


def test_bpe_has_the_size_asked_for_and_shortens_the_text():
    bpe = learn("bpe", [embedded_text()], bpe_vocab_size=1000)
    assert bpe.vocab_size == 1000
    assert len(bpe.encode_array(embedded_text())) < len(embedded_text()) / 2.5


def test_a_tokenizer_file_of_hugging_face_is_read(tmp_path):
    bpe = learn("bpe", [embedded_text()], bpe_vocab_size=300)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(bpe.to_json())["tokenizer"]))
    assert learn(str(file), ()).encode("the cat") == bpe.encode("the cat")
