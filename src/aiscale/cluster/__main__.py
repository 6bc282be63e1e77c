"""A rank's process: `python -m aiscale.cluster FOLDER SIZE RANK[,RANK...]`; see engine.py."""

from aiscale.cluster.engine import main

if __name__ == "__main__":
    main()
