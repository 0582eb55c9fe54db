"""The store of one decision: hosted by the agent that led it, on a port of its own, gone with the next decision."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

__all__ = ["join_store", "open_store"]

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


def join_store(host: str, port: int, seconds: float) -> Any:
    """The store of a decision, for a rank; later waits on it end after `seconds`.

    torch tries again for long, and loudly, where nobody listens: so the host is called first. Raises ConnectionError at once if it is dead,
    torch's DistError if it dies in that very moment or says nothing for a third of the time.
    """
    import torch.distributed as dist

    try:
        socket.create_connection((host, port), timeout=seconds / 3).close()
    except OSError as error:
        raise ConnectionError(f"the store at {host}:{port} cannot be reached: {error.strerror or error}") from None
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds / 3))
    store.set_timeout(timedelta(seconds=seconds))
    return store
