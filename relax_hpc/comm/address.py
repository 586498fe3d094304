"""The address at which this node is reached, and sockets that listen there and nowhere else."""

import socket


def node_address() -> str:
    """An address of this node that the other nodes can reach; loopback where there is no other."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # asks the routing table; sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
