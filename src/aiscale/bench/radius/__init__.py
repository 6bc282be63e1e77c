"""Speed of Radius and its competitors on slow links, and their cost in perplexity: `aiscale bench radius`, `link`.

study.py   step times on a link, and savings from them    steps.py  what its ranks run
sweep.py   perplexity: the training runs                  nodes.py  ranks on virtual nodes with slowed network cards
link.py    compares the emulated link with a real one
"""
