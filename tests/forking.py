"""Commands in forks of a process that has imported torch and Transformers, which takes four seconds of CPU time.

A fork is a process with its own pid, session, signals, environment, output and exit code. It imports the modules of
this project itself. The processes of a launcher in a fork are forks of the launcher. Run as a program, this file is the
server of the forks, on the socket of its first argument.
"""

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NoReturn

LIBRARIES = "accelerate matplotlib.backends.backend_agg matplotlib.figure rich.markdown rich.progress torch._dynamo "
LIBRARIES += "torch._inductor transformers.models.auto transformers.modeling_layers "
LIBRARIES += "transformers.models.gpt2.modeling_gpt2 transformers.processing_utils"
LAUNCHER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
PACKAGES = ("accelerate.commands.", "benchmarks.", "examples.", "modeling_gpt2scratch.", "publishing.", "training.")


class ForkServer:
    """A server of forks, which starts for the first one. It ends when closed, or with the process that started it."""

    process = None

    def __init__(self, environment: dict[str, str]):
        self.environment = environment

    @cached_property
    def requests(self) -> socket.socket:
        requests, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, options = [sys.executable, __file__, str(end.fileno())], {"env": self.environment}
        with end:
            options |= {"pass_fds": [end.fileno()], "stdin": subprocess.DEVNULL, "start_new_session": True}
            self.process = subprocess.Popen(command, **options)
        return requests

    def can_run(self, command: list[str], environment: dict[str, str]) -> bool:
        """Return whether a command is a launcher or one of this project, in the environment of the server."""
        is_known = command[0].endswith(".py") or (command[0] == "-m" and command[1].startswith(PACKAGES))
        return is_known and environment == self.environment

    def close(self) -> None:
        if self.process:
            self.requests.close()
            self.process.wait()


class Fork(subprocess.Popen):
    """A command of Python in a fork, which begins a session. Its parent, the server, sends its pid and exit status."""

    def __init__(self, server: ForkServer, command: list[str], **options):
        self.server = server
        super().__init__(command, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[:9]
        self.answers, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end:
            files = [end.fileno(), 0 if p2cread == -1 else p2cread, c2pwrite, errwrite]
            socket.send_fds(self.server.requests, [json.dumps([args, str(cwd), env]).encode()], files)
        self.pid, self._child_created = int(self.answers.recv(20)), True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags):
        if wait_flags & os.WNOHANG and not select.select([self.answers], [], [], 0)[0]:
            return 0, 0
        with self.answers:
            return self.pid, int(self.answers.recv(20))

    def _internal_poll(self, *_, **__):
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def serve(requests: socket.socket) -> list[str]:
    """Fork for each request and return its command in the fork. The server itself does not return."""
    while True:
        request, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        with suppress(ChildProcessError):  # no zombies
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            if (pid := os.fork()) == 0:
                command, folder, environment = json.loads(request)
                os.chdir(folder)
                _become(files[1:], command, environment)
                return command
            with socket.socket(fileno=files[0]) as answers:
                for file in files[1:]:
                    os.close(file)
                answers.send(b"%d" % pid)
                answers.send(b"%d" % os.waitpid(pid, 0)[1])
            os._exit(0)
        for file in files:
            os.close(file)


def _become(files: list[int], command: list[str], environment: dict[str, str]) -> None:
    """Make this fork a process of its own, with only `files` as its input, output and errors."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv = [sys.executable, *command]


class ForkOfLauncher(subprocess.Popen):
    """A process of a launcher, `python -u ...`, as a fork of the launcher."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        self.pid, self._child_created = os.fork(), True
        if self.pid == 0:
            command = list(args[2:])
            _become([0, 1, 2], command, env)
            sys.stdout.reconfigure(write_through=True)
            _run_to_end(command)


def _run_to_end(command: list[str]) -> NoReturn:
    """Run a command and end like an interpreter, without a return to the frames of the launcher."""
    status = 0
    try:
        run(command)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv, sys.path[0] = command[1:], os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, str(Path(command[0]).absolute().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    for library in LIBRARIES.split():
        importlib.import_module(library)
    sys.modules["matplotlib.figure"].Figure().subplots().figure.savefig(io.BytesIO())  # finds the fonts
    importlib.import_module(LAUNCHER).Popen = ForkOfLauncher
    gc.freeze()  # the collector does not touch these objects in the forks, which would copy their pages
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
