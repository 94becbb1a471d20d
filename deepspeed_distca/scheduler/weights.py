# SPDX-License-Identifier: Apache-2.0
"""By which weights attention is to be balanced, where servers have different speeds or different linear work."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from deepspeed_distca.scheduler.shares import MAX_WEIGHT


def finishing_weights(speeds: Sequence[int], linear: Sequence[int], home: Sequence[int]) -> tuple[int, ...]:
    """The weights by which attention is to be balanced (``balance``'s ``server_weights``).

    A server of speed s is through with its linear work L at L / s, and can then compute attention of its own rows.
    Other ranks' rows are there when those have done their linear work: all of them once the last rank has. So until
    then a server has its own attention to do, as far as there is so much; the rest is spread from then on in
    proportion to speed. Where all servers have enough of their own, (L + A) / s is the same on all of them, A being
    a server's attention. A server without tokens begins with the rows of the others.

    Args:
        speeds: of the servers, whole numbers >= 0. A server of speed 0 gets no attention; its linear work is taken
            to be done at the others' average speed.
        linear: linear work of each server, >= 0.
        home: attention of each server's own rows, >= 0, in the same unit.

    Returns:
        one weight in 0..1000000 for each server, the largest 1000000; the speeds where there is no attention.
    """
    attention, speed = sum(home), sum(speeds)
    if attention <= 0 or speed <= 0:
        return tuple(speeds)
    takers = sum(s > 0 for s in speeds)
    # The last rank is through with its linear work at work / rate; fractions are compared by their products.
    work, rate = 0, 1
    for s, load in zip(speeds, linear, strict=True):
        mine = (load, s) if s else (load * takers, speed)
        if mine[0] * rate > work * mine[1]:
            work, rate = mine
    # All that follows is multiplied by the rate, and then by the sum of speeds, so that nothing is rounded.
    own = [
        min(rate * mine, work * s - rate * load) if s else 0
        for s, load, mine in zip(speeds, linear, home, strict=True)
    ]
    rest = rate * attention - sum(own)
    parts = [mine * speed + s * rest for mine, s in zip(own, speeds, strict=True)]
    return _scaled(parts)


def even_weights(speeds: Sequence[int], linear: Sequence[int], home: Sequence[int]) -> tuple[int, ...]:
    """The weights by which attention is to be balanced in two nano-batches: rows of others are there while a server
    has work of the other half. So (L + A) / s is the same on all servers that get attention, and one without tokens
    has attention all the time.

    Arguments, and what is returned: see :func:`finishing_weights`.
    """
    if sum(home) <= 0 or sum(speeds) <= 0:
        return tuple(speeds)
    takers = sorted((i for i, s in enumerate(speeds) if s), key=lambda i: Fraction(linear[i], speeds[i]))
    work, speed = sum(home), 0  # of those that get attention, which end at work / speed
    for i in takers:
        if work * speeds[i] <= linear[i] * speed:
            break
        work, speed = work + linear[i], speed + speeds[i]
    return _scaled([max(work * s - speed * load, 0) for s, load in zip(speeds, linear, strict=True)])


def _scaled(parts: list[int]) -> tuple[int, ...]:
    most = max(parts)
    return tuple((2 * part * MAX_WEIGHT + most) // (2 * most) for part in parts)
