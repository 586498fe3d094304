"""Episodes: what a policy is asked, and what is learned from what it did.

An environment is an async function of a prompt and a session. It samples through the session and
returns rewards; it never handles tokens. The session keeps every call, and `sequences` makes of
them what is trained on.
"""
