"""Inspects a bus for people: ls, show, verify, gc, export. No role imports it."""
