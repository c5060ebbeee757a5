"""A process that has imported what every engine's processes import of others, and forks.

Each of an engine's processes first imports some 6,500 modules of torch, transformers, flashinfer and others, which
takes 20 s of CPU on a busy machine, and then 1,100 of SGLang, 4 s. Here the first part is done once for each test
worker. Before the fork nothing of SGLang and nothing of ours is imported: boot folder, import watch, patches and
settings run in the new process as in any other. Children that an engine spawns come the same way: before its process
runs anything, it forks a few that wait, and `multiprocessing` gets one of these where it would start an interpreter.
They are its own children, as spawned ones are.

The engine of the xdist group "guarded", those of the image's tests and of scripts/quickstart.sh start as users' do.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

# What brings nearly all of the others along. None of them imports SGLang.
IMPORTED = """
torch torch._dynamo torch._inductor.compile_fx torch._inductor.lowering torch.distributed.fsdp torch._export
torch.testing torch.utils.cpp_extension torch.distributed.tensor torchvision torchaudio
transformers transformers.models.auto.modeling_auto transformers.generation transformers.processing_utils
transformers.integrations.hub_kernels transformers.modeling_utils transformers.models.llama.modeling_llama
flashinfer flashinfer.comm cutlass triton triton_kernels compressed_tensors.quantization mistral_common
openai openai.types.responses openai.types.chat openai.types.beta openai.types.realtime fastapi uvicorn uvloop
zmq.asyncio xgrammar outlines llguidance scipy.stats scipy.signal networkx sympy huggingface_hub
prometheus_client.multiprocess opentelemetry.trace msgspec orjson setproctitle psutil IPython gguf aiohttp
httpx requests
""".split()
SPARES = 6  # two ranks of two stages, a detokenizer, and one more
LENGTH = struct.Struct("!I")


class Request(NamedTuple):
    """What to run: a command line of Python, and in what."""

    argv: list[str]
    environ: dict[str, str]
    cwd: str
    # The numbers that the file descriptors sent along shall have.
    fds: list[int]


def serve(address: str) -> Request | None:
    """Fork for whoever asks, until standard input ends. Returns in the forked process, with what it is to run."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listening:
        listening.bind(address)
        listening.listen()
        os.write(1, b"ready\n")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        poll = select.poll()
        poll.register(listening, select.POLLIN)
        poll.register(0, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if 0 in ready:
                Path(address).unlink(missing_ok=True)
                Path(address).parent.rmdir()
                return None
            talk, _ = listening.accept()
            if os.fork() == 0:
                break
            talk.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    received = receive(talk)
    assert received is not None
    pid = os.fork()
    if pid != 0:
        _stay_beside(talk, pid)
    talk.close()
    return _become_engine(*received)


def _stay_beside(talk: socket.socket, pid: int) -> NoReturn:
    """Say how the process ended that was asked for; end it where the one who asked is gone first."""
    os.setsid()
    talk.sendall(LENGTH.pack(pid))
    poll = select.poll()
    poll.register(talk, select.POLLIN)
    poll.register(os.pidfd_open(pid), select.POLLIN)
    if talk.fileno() in [fd for fd, _ in poll.poll()]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        talk.sendall(LENGTH.pack(status))
    os._exit(0)


def _become_engine(request: Request, fds: list[int]) -> Request:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _place(fds, request.fds)
    ours: list[socket.socket] = []
    for _ in range(SPARES):
        mine, its = socket.socketpair()
        if os.fork() == 0:
            for other in (*ours, mine):
                other.close()
            return _become_child(its)
        its.close()
        ours.append(mine)
    _spawn_from(ours)
    return request


def _become_child(talk: socket.socket) -> Request:
    """Wait to be needed. Ends where the process that forked it ends first."""
    received = receive(talk)
    if received is None:
        os._exit(0)
    talk.sendall(LENGTH.pack(os.getpid()))
    talk.close()
    request, fds = received
    _place(fds, request.fds)
    return request


def _spawn_from(spares: list[socket.socket]) -> None:
    """From now on `multiprocessing` spawns by waking a spare; beyond them, as ever."""
    from multiprocessing import util

    as_ever = util.spawnv_passfds

    def spawnv_passfds(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in args]
        if "--multiprocessing-fork" not in words or not spares:
            return int(as_ever(path, args, passfds))
        talk = spares.pop(0)
        with talk:
            send(talk, Request(words, dict(os.environ), str(Path.cwd()), list(passfds)), list(passfds))
            return int(LENGTH.unpack(read(talk, LENGTH.size))[0])

    util.spawnv_passfds = spawnv_passfds


def run_here(request: Request) -> NoReturn:
    """Go on as the interpreter that was asked for: environment, path, sitecustomize, and then the program."""
    os.environ.clear()
    os.environ.update(request.environ)
    os.chdir(request.cwd)
    entries = [entry for entry in request.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    words = request.argv[1:]
    while words[0] not in ("-c", "-m"):
        option = words.pop(0)
        option += words.pop(0) if option == "-W" else ""
        assert option == "-Wignore", f"{option} is not known here"
        importlib.import_module("warnings").simplefilter("ignore")
    kind, program, *rest = words
    sys.path[:] = ["" if kind == "-c" else request.cwd, *entries, *_PATH]
    importlib.invalidate_caches()
    _threads(request.environ)
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("site").execsitecustomize()
    if kind == "-m":
        sys.argv[:] = [program, *rest]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = ["-c", *rest]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(program, vars(main))
    raise SystemExit(0)


def _threads(environ: Mapping[str, str]) -> None:
    """What torch reads of the environment when it is imported, which was earlier here."""
    import torch

    wanted = environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) != torch.get_num_threads():
        torch.set_num_threads(int(wanted))


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give received file descriptors the numbers they have on the other side."""
    high = 512 + max(numbers)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, high) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def send(talk: socket.socket, request: Request, fds: Sequence[int]) -> None:
    data = json.dumps(request).encode()
    talk.sendmsg([LENGTH.pack(len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    talk.sendall(data)


def receive(talk: socket.socket) -> tuple[Request, list[int]] | None:
    """A request and the file descriptors that came along; None where the other side has gone."""
    fds = array.array("i")
    head, ancillary, _, _ = talk.recvmsg(LENGTH.size, socket.CMSG_LEN(64 * fds.itemsize))
    if not head:
        return None
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    request = Request(*json.loads(read(talk, LENGTH.unpack(head)[0])))
    return request, list(fds)


def read(talk: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        more = talk.recv(n_bytes - len(data))
        if not more:
            raise EOFError("the warm process has gone")
        data += more
    return data


_PATH: list[str] = []


def _import_all() -> None:
    gc.disable()
    for name in IMPORTED:
        # Which of them an environment has is the engine's matter.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Nothing that was imported becomes garbage: a fork that looks through it copies its pages.
    gc.freeze()
    gc.enable()
    early = [name for name in sys.modules if name.partition(".")[0] in ("sglang", "dynchunk")]
    assert not early, f"imported before its time: {early[:3]}"


if __name__ == "__main__":
    _PATH[:] = sys.path[1:]
    _import_all()
    wanted = serve(sys.argv[1])
    if wanted is not None:
        run_here(wanted)
