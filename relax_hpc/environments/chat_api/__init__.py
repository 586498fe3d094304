"""Serves the policy as an OpenAI-compatible endpoint, for agents that are separate programs.

`server.serving` gives an episode an address and a key. Requests with the key go through the
episode's session: sampled tokens stay as they are, though the agent sees and sends text. A request
field is obeyed or refused; fields that change no token are ignored.
"""
