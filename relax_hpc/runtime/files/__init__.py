"""Keeps files: records, patience with storage, permissions, secrets."""
