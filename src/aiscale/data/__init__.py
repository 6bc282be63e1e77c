"""Text, tokens and the order in which training reads them; see the modules."""

from aiscale.data.corpus import Corpus, bigram_entropy, embedded_text, find_text, open_corpus, train_tokenizer
from aiscale.data.images import NpzDataset, draw_shapes, write_npz
from aiscale.data.order import Batches
from aiscale.data.prepare import prepare_corpus
from aiscale.data.shards import ShardError, Tokens, read_corpus, write_corpus
from aiscale.data.tokenizers import Tokenizer, learn
from aiscale.data.toy import toy_text

__all__ = [
    "Batches",
    "Corpus",
    "NpzDataset",
    "ShardError",
    "Tokenizer",
    "Tokens",
    "bigram_entropy",
    "draw_shapes",
    "embedded_text",
    "find_text",
    "learn",
    "open_corpus",
    "prepare_corpus",
    "read_corpus",
    "toy_text",
    "train_tokenizer",
    "write_corpus",
    "write_npz",
]
