"""Text, tokens and the order in which training reads them; see the modules."""

from aiscale.data.clean import clean_corpus, describe, kept
from aiscale.data.corpus import Corpus, embedded_text, find_text, open_corpus, train_tokenizer
from aiscale.data.filters import band_keys, found_share, similarity
from aiscale.data.images import draw_shapes
from aiscale.data.order import Batches
from aiscale.data.prepare import prepare_corpus
from aiscale.data.science import package_documents
from aiscale.data.stored import read_corpus
from aiscale.data.tokenizers import Tokenizer, learn
