# SPDX-License-Identifier: Apache-2.0
"""What ranks say before their first collective: what each of them runs, and whether it can.

A collective that a rank does not come to is a wait, and collectives that do not fit together may be anything. So ranks
first leave a note each in the store of torch.distributed, and read those of the others: whatever differs, a rank that
has an error of its own and a rank that says nothing are known to all of them within a time limit, by name.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.errors import AgreementError
from deepspeed_distca.attention_server.coordination.store import store_of

#: Seconds for which a rank with an error gives the others time to read why: the store may end with its process.
_LINGER = 2.0
#: Ranks that an error lists by number.
_LISTED = 16
_DECIDED = "decided: "

#: Numbers this process's hellos: all ranks say it equally often. Never again from the start, since a store may outlive
#: a process group.
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself.

    Attributes:
        state: "on", "off" (nothing is wanted of the others), or "unknown" (it failed before it could tell).
        same: what must be the same on all ranks that are on, by the name that an error gives it; JSON values.
        own: what the others want to know of this rank; JSON values.
        error: why it cannot go on; None: it can.
    """

    state: str
    same: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def machine() -> str:
    """Names this machine, by which ranks of one node know each other: containers on it say the same, too."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


@dataclass(frozen=True)
class Meeting:
    """Ranks that go on together.

    Attributes:
        name: of what they go on with, the same on all ranks and for nothing else.
        hellos: by rank.
    """

    name: str
    hellos: list[Hello]


def say_hello(hello: Hello, seconds: float) -> tuple[int, list[Hello] | None]:
    """Leaves this rank's note and reads those of the others. Collective over the default group, but no collective.

    Args:
        seconds: how long the others are waited for; 0 for a rank that only leaves its note.

    Returns:
        the number of this hello, the same on all ranks; and the notes by rank, or None where no rank is on.

    Raises:
        AgreementError: some rank is on, and the ranks cannot go on together; the same on every rank.
    """
    number = next(_NUMBERS)
    world = dist.get_world_size()
    try:
        notes = _Notes(number)
        notes.leave(hello)
        if not seconds:
            return number, None
        missing = notes.wait(seconds)
        came = notes.read(some_are_missing=bool(missing))
        problem = _problem(came, missing)
        if problem:
            notes.linger()
    except (RuntimeError, OSError) as error:
        if hello.state == "off":
            return number, None
        raise AgreementError(
            "the ranks could not tell each other what they run: the store of torch.distributed, which rank 0 or the "
            f"launcher holds, does not answer; look for an earlier error there ({error})"
        ) from error
    if problem:
        raise AgreementError(problem)
    everyone = len(came) == world and all(h.state == "on" for h in came.values())
    return number, [came[rank] for rank in range(world)] if everyone else None


class _Notes:
    """The notes of one hello.

    Keys of the store: ``text/<digest>``, what some rank says; ``rank/<rank>``, the digest of its text; ``came`` and
    ``read``, how many ranks have left and read theirs; ``decided``, who is missing.
    """

    def __init__(self, number: int) -> None:
        self._store, self._world = store_of(f"distca/hello/{number}"), dist.get_world_size()

    def leave(self, hello: Hello) -> None:
        text = json.dumps(asdict(hello))
        # Most ranks say the very same: each text is kept and read once.
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._store.set(f"text/{digest}", text)
        self._store.set(f"rank/{dist.get_rank()}", digest)
        if self._store.add("came", 1) == self._world:
            self._decide("")

    def wait(self, seconds: float) -> str:
        """Waits for the notes of all ranks; says who did not come, and is empty where all did. Whoever is the first to
        know decides it for all: nobody goes on while another has given up."""
        if not _until(lambda: self._store.check(["decided"]), seconds):
            missing = [rank for rank in range(self._world) if not self._store.check([f"rank/{rank}"])]
            if missing:
                self._decide(
                    f"ranks {ranks_in_words(missing)} said nothing within {seconds:g} s (`distca.timeout_seconds`) "
                    f"that rank {dist.get_rank()} waited"
                )
        return self._get("decided").removeprefix(_DECIDED)

    def _decide(self, missing: str) -> None:
        self._store.compare_set("decided", "", _DECIDED + missing)

    def read(self, *, some_are_missing: bool) -> dict[int, Hello]:
        """The notes that are there, by rank."""
        ranks = list(range(self._world))
        if some_are_missing:
            ranks = [rank for rank in ranks if self._store.check([f"rank/{rank}"])]
        digests = [self._get(f"rank/{rank}") for rank in ranks]
        texts = {digest: Hello(**json.loads(self._get(f"text/{digest}"))) for digest in set(digests)}
        if self._store.add("read", 1) == self._world:
            keys = [*(f"rank/{rank}" for rank in ranks), *(f"text/{digest}" for digest in texts)]
            for key in (*keys, "came", "decided"):
                with suppress(RuntimeError):  # not every kind of store can
                    self._store.delete_key(key)
        return {rank: texts[digest] for rank, digest in zip(ranks, digests, strict=True)}

    def linger(self) -> None:
        """Until all ranks have read, or for a little while."""
        with suppress(RuntimeError):  # they have, and the store is gone already
            _until(lambda: self._store.add("read", 0) >= self._world, _LINGER)

    def _get(self, key: str) -> str:
        return self._store.get(key).decode()


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time. Asked again and again: a store's own waiting cannot be interrupted, and says
    warnings when it ends."""
    end, pause = time.monotonic() + seconds, 0.001
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _problem(came: Mapping[int, Hello], missing: str) -> str:
    """Why the ranks cannot go on together, the same on all of them; or nothing.

    Args:
        came: by rank.
        missing: who did not, in words.
    """
    on = [rank for rank, hello in came.items() if hello.state == "on"]
    if not on:
        return ""  # whatever the others do, it is no business of ours
    problems = [f"rank {rank} cannot go on: {hello.error}" for rank, hello in came.items() if hello.error]
    off = [rank for rank, hello in came.items() if hello.state == "off"]
    if off:
        problems.append(
            f"the `distca` block is in force on ranks {ranks_in_words(on)}, but absent or disabled on ranks "
            f"{ranks_in_words(off)}; give all of them the same configuration"
        )
    if missing:
        problems.append(
            f"{missing}. Every rank must import deepspeed_distca and call deepspeed.initialize, or attach, equally "
            "often; look for an earlier error on them"
        )
    problems += differences({rank: came[rank].same for rank in on if not came[rank].error})
    return "; ".join(problems)


def differences(said: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What is not the same on all ranks, in words.

    Args:
        said: by rank, JSON values by name.
    """
    found = []
    for name in dict.fromkeys(name for values in said.values() for name in values):
        by_value: dict[str, list[int]] = {}
        for rank, values in said.items():
            by_value.setdefault(json.dumps(values.get(name)), []).append(rank)
        if len(by_value) > 1:
            parts = [f"{_short(value)} on ranks {ranks_in_words(ranks)}" for value, ranks in by_value.items()]
            found.append(f"{name} is {', '.join(parts[:-1])} and {parts[-1]}; all ranks need the same")
    return found


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "[0, 1]", or the first of many and their number."""
    ranks = sorted(ranks)
    if len(ranks) <= _LISTED:
        return str(ranks)
    return f"[{', '.join(map(str, ranks[:_LISTED]))}, ...] ({len(ranks)} of them)"


def _short(value: str) -> str:
    words = "left out" if value == "null" else value
    return words if len(words) <= 200 else f"{words[:200]}..."
