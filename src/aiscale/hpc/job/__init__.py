"""The shell function that launchers take from the environment: banner, unpacking, doctor, requeue, engines.

    eval "$(python -m aiscale.hpc.job)"     # in a batch script; then: job begin, job doctor, job engines

job.sh holds it, and says what each part does. `python -m aiscale.hpc.job` prints it behind a few facts of the site.
"""
