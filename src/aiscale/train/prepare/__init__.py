"""Text, tokens and the order in which training reads them; see the modules."""

from aiscale.train.prepare.clean import clean_corpus, describe, kept
from aiscale.train.prepare.corpus import (
    Corpus,
    embedded_text,
    find_text,
    open_corpus,
    train_tokenizer,
)
from aiscale.train.prepare.filters import band_keys, found_share, similarity
from aiscale.train.prepare.images import draw_shapes
from aiscale.train.prepare.order import Batches
from aiscale.train.prepare.prepare import prepare_corpus
from aiscale.train.prepare.science import package_documents
from aiscale.train.prepare.stored import read_corpus
from aiscale.train.prepare.tokenizers import Tokenizer, learn
