"""Two nodes, each a network namespace of this machine."""

import os
import shutil
import subprocess
from pathlib import Path


def ip(*arguments):
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True)


class Nodes:
    def __init__(self):
        self.names = [f"rx{os.getpid()}{each}" for each in "ab"]
        self.hosts = [Path("/etc/netns") / name / "hosts" for name in self.names]

    def __enter__(self):
        for name in self.names:
            ip("netns", "add", name)
        one, other = self.names
        ip("-n", one, "link", "add", "ib0", "type", "veth", "peer", "name", "ib0", "netns", other)
        for place, name in enumerate(self.names):
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "nowhere")
            for device in ("lo", "ib0", "eth0", "nowhere"):
                ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "address", "add", f"10.1.0.{place + 2}/24", "dev", "ib0")
            ip("-n", name, "address", "add", f"fd00::{place + 2}/64", "dev", "ib0", "nodad")
            # Of both nodes the same one, as of a bridge for containers.
            ip("-n", name, "address", "add", "192.168.7.1/24", "dev", "eth0")
        self.call_both("192.168.7.1")
        return self

    def call_both(self, found):
        """Has /etc/hosts lead from the names of both to an address; none: nowhere."""
        for path in self.hosts:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"{found} {name}\n" for name in self.names if found]
            path.write_text("".join(["127.0.0.1 localhost\n", *lines]))

    def __exit__(self, *_):
        for name, path in zip(self.names, self.hosts, strict=True):
            subprocess.run(["ip", "netns", "delete", name], check=False)
            shutil.rmtree(path.parent, ignore_errors=True)

    def on(self, place):
        """The words before a command that runs it on a node."""
        words = ["ip", "netns", "exec", self.names[place], "unshare", "--uts", "sh", "-c"]
        return [*words, 'hostname "$0"; exec "$@"', self.names[place]]
