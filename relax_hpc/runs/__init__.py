"""Shows and controls runs: status, logs, cancel, resume, replay.

`boards/` draws curves while a run goes on, `viewer/` shows trajectories, `scale/` adds and removes
engines.
"""
