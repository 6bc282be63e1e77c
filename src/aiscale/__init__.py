"""aiscale: a workshop kit that teaches, and then does, the training of language models at scale."""
