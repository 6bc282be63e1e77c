"""Text made ready for training: cleaned, and as tokens; see the modules."""

from aiscale.train.prepare.clean import clean_corpus, describe, kept
from aiscale.train.prepare.corpus import embedded_text, find_text
from aiscale.train.prepare.filters import band_keys, found_share, similarity
from aiscale.train.prepare.images import draw_shapes
from aiscale.train.prepare.prepare import prepare_corpus
from aiscale.train.prepare.science import package_documents
from aiscale.train.prepare.tokenizers import Tokenizer, learn
