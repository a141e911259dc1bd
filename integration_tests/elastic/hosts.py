"""Hosts on one machine: network namespaces with a link each to a bridge. Linux, as root, with the `ip` command."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def possible() -> bool:
    """Whether hosts can be made here."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"mwt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _ip("netns", "del", name)
    return made


class Hosts:
    """`count` hosts, which reach each other at their `addresses`. `megabits`: of each link and second; None for all there is."""

    interface = "eth0"

    def __init__(self, count: int, megabits: int | None = None) -> None:
        self._prefix, self._megabits = f"mw{os.getpid()}", megabits
        self._bridge = f"{self._prefix}b"
        self.addresses = [f"10.213.{os.getpid() % 250}.{10 + host}" for host in range(count)]

    def name(self, host: int) -> str:
        """Of its namespace."""
        return f"{self._prefix}h{host}"

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on a host."""
        return ["ip", "netns", "exec", self.name(host), *words]

    def kill(self, host: int) -> None:
        """SIGKILL to all processes of a host."""
        for pid in _run("ip", "netns", "pids", self.name(host)).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut(self, host: int) -> None:
        """Take the link of a host away."""
        _ip("link", "set", self._end(host), "down")

    def mend(self, host: int) -> None:
        """Give it back."""
        _ip("link", "set", self._end(host), "up")

    def _end(self, host: int) -> str:
        """The end of the link at the bridge."""
        return f"{self._prefix}v{host}"

    def _names(self, host: int) -> Path:
        """The folder that `ip netns exec` shows as /etc on a host."""
        return Path("/etc/netns", self.name(host))

    def make(self) -> None:
        """Make bridge, hosts and links. Addresses have names, so that nobody waits for a name server."""
        named = "".join(f"{address} host{host}\n" for host, address in enumerate(self.addresses))
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for host, address in enumerate(self.addresses):
            name, end = self.name(host), self._end(host)
            self._names(host).mkdir(parents=True)
            (self._names(host) / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n{named}")
            (self._names(host) / "resolv.conf").write_text("options timeout:1 attempts:1\n")
            _ip("netns", "add", name)
            _ip("link", "add", end, "type", "veth", "peer", "name", self.interface, "netns", name)
            _ip("link", "set", end, "master", self._bridge)
            _ip("link", "set", end, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", self.interface)
            for interface in ("lo", self.interface):
                _ip("-n", name, "link", "set", interface, "up")
            if self._megabits is not None:
                rate = [f"{self._megabits}mbit", "burst", "64kb", "latency", "100ms"]
                _run("tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", *rate)

    def remove(self) -> None:
        """Remove what there is of them."""
        for host in range(len(self.addresses)):
            with suppress(subprocess.CalledProcessError):
                self.kill(host)
            shutil.rmtree(self._names(host), ignore_errors=True)
            for words in (("link", "del", self._end(host)), ("netns", "del", self.name(host))):
                with suppress(subprocess.CalledProcessError):
                    _ip(*words)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)


@contextmanager
def hosts(count: int, megabits: int | None = None) -> Iterator[Hosts]:
    """Inside, there are so many hosts."""
    made = Hosts(count, megabits)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
