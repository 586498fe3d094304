"""Holds what roles that train or score share: duties of rank 0, start, checks, memory."""
