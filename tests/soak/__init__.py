"""The soak test: jobs are disturbed repeatedly under a private Slurm; is anything lost?

testbed.py   a private Slurm of two nodes, a launcher, and four disturbances
__main__.py  rounds of disturbances drawn from a seed, each compared bit for bit with the
             undisturbed run
"""
