"""Runs the processes of a run.

    rollout, engine           sample and score; keep engines
    actor, sft                train the policy on the bus, or on documents
    scorer                    logprobs of a fixed model; `reference` and `teacher` run it
    critic                    a scorer that learns
    training                  what these share: duties of rank 0, start, checks
    dealing                   batches to portions to micro-batches

`table.py` says what each role is. Its folder has `build.py` (makes its parts) or `loop.py` (runs
them), mostly both. A new one needs a section in `config.run`, too. If it writes columns:
`schema.COLUMNS`, and a number in `schema.COLUMN_WRITERS`. If it notes events or files of its own:
`runtime.telemetry.event_table`, `runtime.paths`.
"""
