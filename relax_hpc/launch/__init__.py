"""Turns a job file into a Slurm job: checks, placement, the job script, restarts and requeues.

From `relax-hpc submit` to a process on a node, in reading order:

    submit          `submit`: resolves the job, checks it, makes the run directory, starts it
    placement       `place`: components, their tasks and nodes
    preflight       `check`: every refusal before anything is queued
    script          `slurm_script`: headers, then `supervision.sh` with one `srun` per component
    slurm           `HetSlurmExecutor.submit_het`: sbatch, through submitit
    supervision.sh  `supervise`, in the job: starts each step, and starts it again
    entry           `main`, in a task: who it is; then `roles.task.run`

What a kill of rank 0 does: `roles.actor.build`.

Only this package uses submitit. `sites/` holds the included cluster profiles.
"""
