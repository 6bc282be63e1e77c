"""`aiscale submit FILE`: checks a launcher and all that it needs on the login node, says what it costs, and submits it.

launcher.py  what a file asks for: options of sbatch, its settings, the run that it trains
command.py   one question each: environment, versions, corpus, account, modules, space, time, Slurm's own opinion
"""
