"""Our tokenizers as tokenizers of transformers, with the same ids for the same text.

HFLM("mine/", tokenizer=hugging_face_tokenizer(tokenizer))
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from aiscale.config import ConfigError
from aiscale.data import Tokenizer
from aiscale.data.tokenizers import WORD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def end_of_text(tokenizer: Tokenizer) -> int:
    """The last token of the separator between documents: <|endoftext|>, or a line end if there is no such token. With
    neither (a vocabulary without line ends), token 0."""
    try:
        return tokenizer.encode(tokenizer.separator)[-1]
    except ConfigError:  # a char or word tokenizer raises for text outside its vocabulary
        return 0


def hugging_face_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A transformers tokenizer that gives the same ids; end_of_text is its bos, eos and pad token."""
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    if tokenizer.kind == "bpe":
        library = Library.from_str(json.dumps(json.loads(tokenizer.to_json())["tokenizer"]))
    else:
        library = _bytes() if tokenizer.kind == "byte" else _units(tokenizer)
    end = library.id_to_token(end_of_text(tokenizer))
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token=end, eos_token=end, pad_token=end)


def _bytes():
    """BPE without merges: every byte is a token with its own value as id."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    # The library writes a byte as a printable character: itself if it is one, else one from 256 on, in order.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    library = Library(models.BPE({names[byte]: byte for byte in range(256)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return library


def _units(tokenizer: Tokenizer):
    """A character or word tokenizer; text outside its vocabulary is an error here too."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    units = tokenizer.characters if tokenizer.kind == "char" else tokenizer.words
    library = Library(models.WordLevel({unit: i for i, unit in enumerate(units)}, unk_token="<unk>"))
    pattern = r"[\s\S]" if tokenizer.kind == "char" else WORD.pattern
    library.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    library.decoder = decoders.Fuse()
    return library
