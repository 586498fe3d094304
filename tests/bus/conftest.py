import os

import pytest


@pytest.fixture(autouse=True)
def disks_are_not_waited_for(monkeypatch):
    """A process that ends loses nothing it wrote; only a power cut would."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
