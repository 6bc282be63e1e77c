"""Opening what a run left behind: the trained model and its tokenizer.

model, tokenizer = open_trained("runs/laptop")
"""

from __future__ import annotations

from pathlib import Path

from aiscale import checkpoint
from aiscale.data import Tokenizer
from aiscale.model import GPT
from aiscale.model.build import HFModel, build_model
from aiscale.train.records import RunFolderError, load_run, run_id_of


def open_trained(path: str | Path, *, best: bool = False) -> tuple[GPT | HFModel, Tokenizer]:
    """The model of a run folder's newest checkpoint, in fp32 and ready to generate, and its tokenizer.

    best: of the checkpoint with the lowest validation loss.
    """
    path = Path(path)
    run = load_run(path)
    chosen = (checkpoint.best if best else checkpoint.latest)(path / "checkpoints", run_id_of(path))
    if chosen is None:
        raise RunFolderError(f"{path} holds no checkpoint yet: let the run reach one (loop.checkpoint_every)")
    model = build_model(run.model, weights=False)
    weights = model.state_dict()
    checkpoint.load_weights(weights, chosen)
    model.load_state_dict(weights)
    return model.eval(), Tokenizer.from_json((path / "tokenizer.json").read_text())
