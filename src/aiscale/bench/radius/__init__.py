"""Speed of Radius and its competitors on slow links: `aiscale bench radius`.

study.py   step times on a link, and savings from them
steps.py   what its ranks run
nodes.py   ranks on virtual nodes with slowed network cards
"""
