"""One stream from each replica to each ingress: what all texts said since the last message, in one message.

Ray carries the orders and looks after the replicas. A message of Ray's takes each side about a millisecond of a
processor, and one of these a quarter of it. An ingress listens, and an order says where. A replica connects once. What
it sends is pickled, so it sends the ingress's key first, and nothing is read from a connection without it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import pickle
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from paceline.cluster.wire import Address, Hello, Lost, Said
from paceline.core import Delta
from paceline.server.generation import Channel

log = logging.getLogger(__name__)
KEY = 32  # bytes
CONNECT_SECONDS = 10.0  # to connect, and to say the key
Box = asyncio.Queue[Hello | Said | Exception]
Item = Delta | Exception
Message = list[tuple[str, Hello | Said]]  # (order, what it says)


class Receiver:
    """The ingress's end, on its event loop."""

    def __init__(self, host: str) -> None:
        """`host`: an address of this machine that the replicas' machines reach. Raises OSError."""
        self._socket = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        self._key = secrets.token_bytes(KEY)
        self._boxes: dict[str, Box] = {}  # by order
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> Address:
        """Where replicas connect to."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_server(self._read, sock=self._socket)
        host, port = self._socket.getsockname()[:2]
        return Address(host, port, self._key)

    @contextmanager
    def box(self, order: str) -> Iterator[Box]:
        """Where the answers to an order come in."""
        box = self._boxes[order] = Box()
        try:
            yield box
        finally:
            del self._boxes[order]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One replica's stream, to its end: then all that it was at is lost."""
        orders: set[str] = set()
        try:
            key = await asyncio.wait_for(reader.readexactly(KEY), CONNECT_SECONDS)
            if not hmac.compare_digest(key, self._key):
                log.warning("a connection to the port of the replicas was closed: it had another key")
                return
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                for order, answer in pickle.loads(await reader.readexactly(size)):
                    if order not in self._boxes:  # its client has left
                        continue
                    self._boxes[order].put_nowait(answer)
                    orders.add(order)
                    if isinstance(answer, Said) and answer.last:
                        orders.discard(order)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.close()
            for order in orders & self._boxes.keys():
                self._boxes[order].put_nowait(Lost("its stream has ended"))


@dataclass(slots=True, eq=False)
class Visit:
    """One order at a replica. `put` is its job's sink, called on the engine's thread."""

    order: str
    stream: _Stream
    sender: Sender
    left: int = 1  # texts still in the making
    begun: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, item: Item) -> None:
        self.sender.put(self, item)

    def say(self, answer: Hello | Said) -> None:
        """On the event loop, and at once."""
        self.stream.send([(self.order, answer)])
        if isinstance(answer, Said) and answer.last:
            self.done.set()


@dataclass(slots=True, eq=False)
class _Stream:
    """A connection to one ingress."""

    writer: asyncio.StreamWriter
    visits: set[Visit] = field(default_factory=set)
    lost: bool = False

    def send(self, message: Message) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self.lost:
            self.writer.write(len(data).to_bytes(4, "big") + data)


class Sender:
    """A replica's end: made on the event loop, and given deltas on the engine's thread."""

    def __init__(self, interval: float, answer: Callable[[list[Item]], Said]) -> None:
        """`interval`: seconds from one message to the next; `answer` makes one of what a text said."""
        self._interval, self._answer = interval, answer
        self._step: list[tuple[Visit, Item]] = []  # of the step that is running
        self._urgent = False  # something of it begins or ends: it does not wait for the interval
        self._channel = Channel[list[tuple[Visit, Item]]](asyncio.get_running_loop(), 2**31)
        self._streams: dict[Address, _Stream] = {}
        self._connecting = asyncio.Lock()
        self._sending = asyncio.create_task(self._send())
        self._watching: set[asyncio.Task[None]] = set()

    @property
    def failed(self) -> bool:
        return self._sending.done()

    @contextmanager
    def visit(self, order: str, stream: _Stream) -> Iterator[Visit]:
        visit = Visit(order, stream, self)
        stream.visits.add(visit)
        try:
            yield visit
        finally:
            stream.visits.discard(visit)

    async def connect(self, address: Address) -> _Stream:
        """The stream to an ingress. Raises OSError if it cannot be reached."""
        async with self._connecting:
            stream = self._streams.get(address)
            if stream is None:
                opening = asyncio.open_connection(address.host, address.port)
                reader, writer = await asyncio.wait_for(opening, CONNECT_SECONDS)
                writer.write(address.key)
                stream = self._streams[address] = _Stream(writer)
                watching = asyncio.create_task(self._watch(address, reader, stream))
                self._watching.add(watching)
                watching.add_done_callback(self._watching.discard)
        return stream

    async def _watch(self, address: Address, reader: asyncio.StreamReader, stream: _Stream) -> None:
        """Until the connection ends: nothing comes this way."""
        try:
            with suppress(OSError):
                await reader.read(1)
        finally:
            stream.lost = True
            del self._streams[address]
            stream.writer.close()
            for visit in stream.visits:
                visit.done.set()

    # On the engine's thread

    def put(self, visit: Visit, item: Item) -> None:
        self._step.append((visit, item))
        ended = not isinstance(item, Delta) or item.finish_reason is not None
        self._urgent |= ended or not visit.begun
        visit.begun = True
        if not isinstance(item, Delta):  # it may come between steps, when none follows
            self.stepped()

    def stepped(self) -> None:
        """A step has ended: what it said goes together."""
        if self._step:
            self._channel.put(self._step, self._urgent)
            self._step, self._urgent = [], False

    # On the event loop

    async def _send(self) -> None:
        while True:
            by_visit: defaultdict[Visit, list[Item]] = defaultdict(list)
            for step in await self._channel.take():
                for visit, item in step:
                    by_visit[visit].append(item)
            messages: defaultdict[_Stream, Message] = defaultdict(list)
            for visit, items in by_visit.items():
                answer = self._answer(items)
                visit.left -= sum(delta.finish_reason is not None for delta in answer.deltas)
                answer.last |= not visit.left
                messages[visit.stream].append((visit.order, answer))
                if answer.last:
                    visit.done.set()
            for stream, message in messages.items():
                stream.send(message)
            await self._channel.rest(self._interval)
