"""A rank: `python -m aiscale.lesson.cluster FOLDER SIZE RANK[,RANK...]`; see engine.py."""

from aiscale.lesson.cluster.engine import main

if __name__ == "__main__":
    main()
