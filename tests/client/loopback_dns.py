"""A name server on this machine that knows SRV records and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

Record = tuple[int, int, int, str]  # priority, weight, port, target


class NameServer:
    """The server's address, and the questions it got."""

    def __init__(self, records: Mapping[str, list[Record]], *, answers: bool = True) -> None:
        self.asked: list[str] = []
        self.was_asked = threading.Event()
        self._records, self._answers = records, answers
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while data := self._socket.recvfrom(4096):
            if not data[0]:
                return
            query = dns.message.from_wire(data[0])
            self.asked.append(str(query.question[0].name).rstrip("."))
            self.was_asked.set()
            if self._answers:
                self._socket.sendto(self._answer(query).to_wire(), data[1])

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        name = query.question[0].name
        texts = [f"{p} {w} {port} {target}." for p, w, port, target in self._records.get(str(name).rstrip("."), ())]
        if texts:
            answer.answer.append(dns.rrset.from_text(name, 60, "IN", "SRV", *texts))
        else:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bell:
            bell.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


@contextmanager
def name_server(records: Mapping[str, list[Record]], *, answers: bool = True) -> Iterator[NameServer]:
    running = NameServer(records, answers=answers)
    try:
        yield running
    finally:
        running.close()
