"""The worker's side of `tests.pool`: what travels between the processes, and the loop that answers requests."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from attrs import frozen

__all__ = ["Died", "Outcome", "Raised", "Request", "Returned", "dump", "load", "serve"]

ROOT = Path(__file__).resolve().parent.parent


@frozen
class Request:
    """What a worker is asked to do. `call` is pickled on its own, so that a function that cannot be imported is an answer, not a crash."""

    rank: int
    world: int
    port: int
    prefix: str
    deadline: float
    call: bytes


@frozen
class Returned:
    """The pickled result of a rank."""

    result: bytes


@frozen
class Raised:
    """An exception of a rank: when it was caught on the machine's monotonic clock, as text, and pickled where that is possible."""

    moment: float
    text: str
    error: bytes | None
    follows: bool


@frozen
class Died:
    """A worker that ended without an answer."""

    exitcode: int | None


Outcome = Returned | Raised | Died


# --- values between processes ---------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Writes tensors by value: torch's own reductions would share memory through file descriptors, or send the whole storage of a view."""

    def reducer_override(self, value: Any) -> Any:
        import torch
        from torch.distributed.tensor import DTensor

        if isinstance(value, DTensor):
            raise TypeError("a DTensor means nothing outside its mesh: return .full_tensor() or .to_local()")
        if isinstance(value, torch.Tensor):
            buffer = io.BytesIO()
            torch.save(value.detach().cpu().clone(memory_format=torch.contiguous_format), buffer)
            return _tensor, (buffer.getvalue(),)
        return NotImplemented


def _tensor(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def dump(value: Any) -> bytes:
    """Pickle a value, tensors by value as plain CPU tensors."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The value that `dump` wrote."""
    return pickle.loads(data)  # noqa: TID251  our own workers, over their own pipes


# --- in the worker --------------------------------------------------------------------------------------------------------------------


def serve(link: connection.Connection, stacks: str) -> None:
    """The life of a worker: answer requests until the other end of the pipe is closed."""
    tests = parent_process()
    assert tests is not None
    threading.Thread(target=_end_with_tests, args=(tests.sentinel,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the test process decides
    sys.path.insert(0, str(ROOT))
    stack_file = Path(stacks).open("w", encoding="utf-8")  # noqa: SIM115  stays open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)

    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays
    while True:
        try:
            request = load(link.recv_bytes())
        except EOFError:
            return
        link.send_bytes(pickle.dumps(_answer(request)))


def _end_with_tests(tests: int) -> None:
    """Wait for the end of the test process, however it ends, and end this one at once. The fork server does not tell its children."""
    connection.wait([tests])
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(request: Request) -> Outcome:
    import torch

    from pdsl.runtime.meshes import leave_island

    environment = dict(os.environ)
    outcome = _run(request)
    # a rank that failed may find its peers gone; there is nothing more to say about it than its own error
    with contextlib.suppress(Exception):
        leave_island()
    gc.collect()  # groups held by cycles, or by the frames of an exception, end now: each has threads that wake up a hundred times a second
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    return outcome


def _run(request: Request) -> Outcome:
    import torch
    from torch.distributed import PrefixStore, TCPStore

    try:
        function, args, kwargs = load(request.call)
        # every wait on the store may outlast the deadline, so that a stuck call is reported with its stacks
        server = TCPStore("127.0.0.1", request.port, is_master=False, timeout=timedelta(seconds=request.deadline + 60.0))
        torch.manual_seed(0)
        result = function(request.rank, request.world, PrefixStore(request.prefix, server), *args, **kwargs)
        return Returned(dump(result))
    except (Exception, SystemExit) as error:  # noqa: BLE001  it is raised again in the test
        moment = time.monotonic()
        text = traceback.format_exc()
        return Raised(moment=moment, text=text, error=_sendable(error), follows=_follows(error))


def _sendable(error: BaseException) -> bytes | None:
    """The exception without its frames, or None where it does not survive the journey or is no ordinary exception."""
    if not isinstance(error, Exception):
        return None
    try:
        data = dump(error)
        load(data)
    except Exception:  # noqa: BLE001  whatever the class of the exception does wrong
        return None
    return data


def _follows(error: BaseException) -> bool:
    """Whether this is what a rank sees when another one has gone: a closed connection or an aborted collective."""
    text = f"{type(error).__name__}: {error}".lower()
    signs = (
        "connection closed",
        "connection reset",
        "broken pipe",
        "connection refused",
        "connection was closed",
        "read error",
        "write error",
    )
    return isinstance(error, ConnectionError | EOFError) or any(sign in text for sign in signs)
