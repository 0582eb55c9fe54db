"""The store of one decision: hosted by the agent that led it, on a port of its own, gone with the next decision."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

__all__ = ["open_store"]

_TIMEOUT = timedelta(seconds=60)


def open_store(host: str) -> tuple[Any, int]:
    """A fresh TCPStore that listens at `host`, and its port. It lives as long as the object. Never fork afterwards: its threads do not come along."""
    import torch.distributed as dist

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=_TIMEOUT)
    return store, port
