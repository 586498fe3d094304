"""Runs episodes: an environment asks the policy through a session, and returns rewards.

An environment is an async function of a prompt and a session; it never handles tokens. The session
records every call, and `record.sequences` turns them into training rows.
"""
