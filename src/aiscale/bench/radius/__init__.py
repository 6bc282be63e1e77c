"""What Radius and its competitors gain on slow links, and what they cost in perplexity: `aiscale bench radius`, `link`.

study.py   speed on a link, over the contenders        steps.py  its ranks, where contenders take turns
sweep.py   perplexity: the queue of training runs      runs.py   one of them
link.py    is the emulated link like a real one?       nodes.py  ranks on virtual nodes whose network is slowed
"""
