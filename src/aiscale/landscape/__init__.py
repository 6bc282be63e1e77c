"""Ideas of other frameworks that no strategy of ours carries and that do not fit into a cell.

elastic, elastic_rank, plans   Bamboo, Oobleck, Varuna: jobs that survive the death of a rank
"""
