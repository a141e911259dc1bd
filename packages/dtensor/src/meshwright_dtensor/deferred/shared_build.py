"""One rank of a host builds, and the others take its results: large tensors are made and filled once for all of them.

Every rank runs the same constructor. At each call that makes or changes a large tensor all ranks of the host wait for each other;
the builder makes the call, and the others map its file and take the new state of the random generator. So all other code, which
every rank runs, finds on each rank the same as on one device, and no call is recorded or replayed.
"""

from __future__ import annotations

import os
import pickle
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch

from meshwright_dtensor.deferred.call_text import generators_of, state_of
from meshwright_dtensor.deferred.channels import Channel, ClosedError
from meshwright_dtensor.deferred.host_ranks import HostRanks
from meshwright_dtensor.deferred.mapped_files import is_plain, is_shared
from meshwright_dtensor.deferred.page_release import Resident, unmap
from meshwright_dtensor.deferred.private_pages import SpareMappings
from meshwright_dtensor.deferred.results import close_files, decode, encode
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.errors import MeshwrightError, UsageError

WAIT_SECONDS = 300.0
"""Seconds that a rank waits for another one of its host to make the same call."""
_SWEEP_SECONDS = 1.0
_TOGETHER = "; the ranks of this host build together"
_END = "the end of deferred_init"
_FIX = "or build on each rank alone: deferred_init(shared=False)"


class SharedBuild:
    """The part of this rank in a build. `building` is entered around it; `call` makes one call for all ranks."""

    def __init__(self, ranks: HostRanks, resident: Resident) -> None:
        self._ranks, self._resident = ranks, resident
        self._spares = SpareMappings()
        # of files that the present call has made: address of the storage -> number
        self._numbers: dict[int, int] = {}
        # addresses of the storages of this build; one of another build cannot have come to the address of a freed one
        self._addresses: set[int] = set()
        self._broken: MeshwrightError | None = None
        self._swept = time.monotonic()
        self.busy = False

    @property
    def builds(self) -> bool:
        """Whether this rank builds for the others."""
        return self._ranks.builder == self._ranks.rank

    def made(self, storage: torch.UntypedStorage, number: int) -> None:
        """Note a new storage of the builder, in the open file `number`, for the result of the present call. Raises OSError."""
        self._spares.add(storage, number)
        address = storage.data_ptr()
        # a tensor that this call has made and freed may have had the same address
        if address in self._numbers:
            os.close(self._numbers.pop(address))
        self._numbers[address] = os.dup(number)
        self._addresses.add(address)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is a file of this build, in which the builder writes for all ranks."""
        if not is_plain(tensor) or not on_host(tensor.device):
            return False
        storage = tensor.untyped_storage()
        return is_shared(storage) and storage.data_ptr() in self._addresses

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, ranks build together; at the end they wait for each other, and an error of one ends the build of all."""
        try:
            yield
            self._meet(_END)
        except BaseException as error:
            self._tell(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._close_numbers()
            # from here on, what a rank writes is its own
            if self.builds:
                self._spares.exchange()
            else:
                self._resident.sweep()
            self._ranks.close()

    def call(
        self,
        text: str,
        compute: Callable[[], Any],
        locally: Callable[[], Any],
        inputs: Sequence[torch.Tensor],
        written: Sequence[int],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> Any:
        """The result of a call that all ranks make at the same time.

        Args:
            text: the call, the same on each rank.
            compute: makes the call on the builder, with large results in files.
            locally: makes the call on another rank, where its result cannot be sent.
            inputs, written: see `encode`.
            arguments: positional ones and keywords; generators among them get the builder's state.

        Raises UsageError: ranks build different models. MeshwrightError: another rank has failed or ended.
        """
        generators = generators_of(*arguments)
        self._meet(text)
        self.busy = True
        try:
            if self.builds:
                return self._computed(compute, inputs, written, generators)
            return self._taken(locally, inputs, written, generators)
        finally:
            self.busy = False

    def _computed(
        self,
        compute: Callable[[], Any],
        inputs: Sequence[torch.Tensor],
        written: Sequence[int],
        generators: Sequence[torch.Generator],
    ) -> Any:
        before = [state_of(generator) for generator in generators]
        try:
            result = compute()
            # a result that ranks cannot share is an error of all ranks
            encoded, files = encode(result, inputs, written, self._numbers, self.holds)
        except Exception as error:
            self._answer(("raised", *_pickled(error)), before, generators)
            raise
        self._answer(("made", encoded), before, generators, files)
        return result

    def _answer(
        self,
        message: tuple[Any, ...],
        before: Sequence[bytes],
        generators: Sequence[torch.Generator],
        files: Sequence[int] = (),
    ) -> None:
        after = [state_of(generator) for generator in generators]
        states = [None if old == new else new for old, new in zip(before, after)]
        try:
            for channel in self._ranks.channels:
                try:
                    channel.send((*message, states), files)
                except ClosedError:
                    self._fail(f"rank {channel.rank} has ended")
        finally:
            self._close_numbers()

    def _taken(
        self,
        locally: Callable[[], Any],
        inputs: Sequence[torch.Tensor],
        written: Sequence[int],
        generators: Sequence[torch.Generator],
    ) -> Any:
        message, files = self._received(None)
        try:
            self._raise_if_over(message)
            kind, *values, states = message
            if kind == "made" and not values[0].is_sent:
                result = locally()
            elif kind == "made":
                result, storages = decode(values[0], inputs, files)
                for storage in storages:
                    self._resident.add(storage)
                    self._addresses.add(storage.data_ptr())
        finally:
            close_files(files)
        for generator, state in zip(generators, states):
            if state is not None:
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        if kind == "raised":
            data, text = values
            raise MeshwrightError(text) if data is None else pickle.loads(data)
        # what this rank has written past torch is in the builder's file by now
        for index in written:
            if self.holds(inputs[index]):
                unmap(inputs[index].untyped_storage())
        if time.monotonic() - self._swept > _SWEEP_SECONDS:
            self._resident.sweep()
            self._swept = time.monotonic()
        return result

    def _meet(self, text: str) -> None:
        """Wait until every rank makes this call."""
        if self._broken is not None:
            raise self._broken
        if self.builds:
            self._ranks.turn_away()
            self._collect(text)
            for channel in self._ranks.channels:
                with suppress(ClosedError):
                    channel.send(("go",))
            return
        channel = self._ranks.channels[0]
        # of a builder that has failed, the last message says why
        with suppress(ClosedError):
            channel.send(("call", text))
        # the builder may have come late itself, and wait for another rank
        message, _ = self._received(2 * WAIT_SECONDS + 10, text)
        self._raise_if_over(message)

    def _raise_if_over(self, message: tuple[Any, ...]) -> None:
        if message[0] == "differs":
            self._differ(message[1])
        if message[0] == "failed":
            self._fail(message[1])

    def _collect(self, text: str) -> None:
        """The calls of all other ranks, compared with that of the builder."""
        waiting = selectors.DefaultSelector()
        for channel in self._ranks.channels:
            waiting.register(channel.socket, selectors.EVENT_READ, channel)
        deadline = time.monotonic() + WAIT_SECONDS
        with waiting:
            while waiting.get_map():
                events = waiting.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    late = sorted(key.data.rank for key in waiting.get_map().values())
                    self._fail(_late(late, text))
                for key, _ in events:
                    self._compare(key.data, text)
                    waiting.unregister(key.fileobj)

    def _compare(self, channel: Channel, text: str) -> None:
        try:
            (kind, value), _ = channel.receive(WAIT_SECONDS)
        except (ClosedError, TimeoutError):
            self._fail(f"rank {channel.rank} has ended")
        if kind == "failed":
            self._fail(f"rank {channel.rank} has failed: {value}")
        if value != text:
            self._differ(
                f"ranks of this host build different models: rank {self._ranks.rank} is at {text}, and rank {channel.rank} is at "
                f"{value}; build the same model on every rank, seed every rank alike (torch.manual_seed), {_FIX}"
            )

    def _received(self, timeout: float | None, text: str = "") -> tuple[Any, list[int]]:
        channel = self._ranks.channels[0]
        try:
            return channel.receive(timeout)
        except TimeoutError:
            self._fail(_late([channel.rank], text))
        except ClosedError:
            self._fail(f"rank {channel.rank} has ended")

    def _fail(self, text: str) -> NoReturn:
        self._broken = MeshwrightError(
            f"deferred_init: {text}" if text.endswith(_TOGETHER) else f"deferred_init: {text}{_TOGETHER}"
        )
        self._send_all(("failed", text))
        raise self._broken

    def _differ(self, text: str) -> NoReturn:
        self._broken = UsageError(f"deferred_init: {text.removeprefix('deferred_init: ')}")
        self._send_all(("differs", text))
        raise self._broken

    def _tell(self, text: str) -> None:
        """Tell the other ranks of an error of this one."""
        if self._broken is None:
            self._send_all(("failed", f"rank {self._ranks.rank} has failed: {text}" if self.builds else text))

    def _send_all(self, message: tuple[str, str]) -> None:
        for channel in self._ranks.channels:
            with suppress(ClosedError):
                channel.send(message if self.builds or message[0] == "failed" else ("failed", message[1]))

    def _close_numbers(self) -> None:
        close_files(list(self._numbers.values()))
        self._numbers.clear()


def _late(ranks: Sequence[int], text: str) -> str:
    return (
        f"rank {', '.join(map(str, ranks))} has not made the call {text} in {WAIT_SECONDS:g} s; a rank that waits for others "
        f"inside of deferred_init (a barrier, a download by one rank first) stops the build: do it before, {_FIX}"
    )


def _pickled(error: Exception) -> tuple[bytes | None, str]:
    """An error that can be sent, and its text."""
    text = f"{type(error).__name__}: {error}"
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return data, text
    return None, text
