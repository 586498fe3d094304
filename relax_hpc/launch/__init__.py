"""Turns a job file into a Slurm job: checks, placement, the job script, restarts and requeues.

Only this package uses submitit. `sites/` holds the included cluster profiles.
"""
