"""Runs episodes: an environment asks the policy through a session, and returns rewards.

An environment is an async function of a prompt and a session; it never handles tokens. The session
records every call, and `record.sequences` turns them into training rows. `rewards` has what scores
them.

A new environment is a class with `async def rollout(prompt, session)`, made without arguments, and
a line in `registry.ENVIRONMENTS`. A new reward is a file in `rewards.functions` with `score`, whose
arguments `rewards.contract` lists, and a line in `rewards.registry.REWARDS`. A user's own are
`file.py:Class` and `file.py:function` in the job.
"""
