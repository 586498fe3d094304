"""Runs the processes of a run.

    rollout, engine           sample and score; keep engines
    actor, sft                train the policy on the bus, or on documents
    scorer                    logprobs of a fixed model; `reference` and `teacher` run it
    critic                    a scorer that learns
    training                  what these share: duties of rank 0, start, checks
    dealing                   batches to portions to micro-batches

A new role is a `Role` in `table.py` (components, checks, what a task runs), with a loop in a folder
of its own, and a section in `config.run` (of what trains or scores, in `config.actor`). Also,

    if it writes columns      `schema.COLUMNS`, `schema.COLUMN_WRITERS`, and `RunConfig.columns`,
                              so that the actor waits for them
    if its tasks fill nodes   `config.checks._check_tasks_fill_nodes`
    if it saves checkpoints   `actor.build.main` (shards stay until both cover them), `ending`,
                              `launch.requeue`, `launch.holder`
    if it has a model         `training.gpu_memory`, `config.programs` (paths), `runs.changes` (its
                              layout), `rollout.prompt_check` (longest rows)
    for events and files      `runtime.telemetry.event_table`, `runtime.paths`
"""
