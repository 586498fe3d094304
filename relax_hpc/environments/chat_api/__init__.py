"""The policy as an OpenAI-compatible endpoint: for agents that are programs of their own.

`server.serving` gives an episode an address and a key. What is asked there with the key goes
through the episode's session: what was sampled stays as it is, token by token, though the agent
sees and sends text. A field of a request is obeyed or refused; those that change no token are
passed over.
"""
