"""The image's root file system, and containers started from it without a container engine."""

import atexit
import fcntl
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time

from chart import ROOT

BIN = pathlib.Path(os.environ.get("KDT_BIN_DIR", ROOT / "build/release/bin"))
_START = pathlib.Path(__file__).parent / "container"


def temporary_folder():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kdt-image-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    return folder


def assemble():
    """The root file system by deploy/docker/assemble from the binaries under test, or one that is there already."""
    if ready := os.environ.get("KDT_IMAGE_ROOT"):
        return pathlib.Path(ready)
    root = temporary_folder() / "root"
    subprocess.run([ROOT / "deploy/docker/assemble", BIN, root], check=True, stdin=subprocess.DEVNULL)
    return root


def enter_own_network():
    """Gives this process and those it starts from now on a network with a loopback and nothing else, as a pod has one."""
    if not hasattr(os, "unshare"):  # Python 3.12
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "unshare of the network")
    else:
        os.unshare(os.CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


class Container:
    """One command in the image. binds: ("HOST:PATH[:ro]", ...)."""

    def __init__(self, root, command, binds=(), env=None):
        options = [part for bind in binds for part in ("--bind", bind)]
        options += [part for name, value in (env or {}).items() for part in ("--env", f"{name}={value}")]
        self.log = temporary_folder() / "log"
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [_START, root, *options, "--", *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def text(self):
        return self.log.read_text(errors="replace")

    def signal(self, number):
        """To the command itself, as an engine does."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), number)

    def ended(self):
        return self.process.poll() is not None

    def wait(self, seconds):
        """Exit status; 128 + N after signal N."""
        return self.process.wait(seconds)

    def kill(self):
        if not self.ended():
            self.process.send_signal(signal.SIGKILL)  # --kill-child takes the command along
            self.process.wait()


def run(root, command, seconds=60, **options):
    """Runs a command to its end: (exit status, output)."""
    container = Container(root, command, **options)
    try:
        return container.wait(seconds), container.text()
    finally:
        container.kill()


def wait_until(condition, seconds, containers=()):
    """False when the time is over or a container has ended first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        if any(c.ended() for c in containers):
            return False
        time.sleep(0.2)
    return False
