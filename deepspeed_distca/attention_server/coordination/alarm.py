# SPDX-License-Identifier: Apache-2.0
"""That some rank has failed, as the threads of one process tell each other."""

from __future__ import annotations

import threading

#: Seconds at one and the same place after which a training thread that was not reached by an alarm counts as waiting.
STUCK = 2.0


class Alarm:
    """Of one watch. There is one at most: the first counts.

    Attributes:
        text: which rank has failed, where and why; None: none has. Written by the lookout's thread, and by the guard's
            where the lookout's hangs in the store.
        patience: seconds for which the training's thread may stay where it is. Written before the text, with it.
        told: the training's thread raises an error on this account, or its own. Written by the training's threads.
    """

    def __init__(self) -> None:
        self.text: str | None = None
        self.patience = STUCK
        self.told = False
        self._known = threading.Event()

    def sound(self, text: str, patience: float = STUCK) -> bool:
        """Whether it is the first."""
        if self.text is not None:
            return False
        self.patience, self.text = patience, text
        self._known.set()
        return True

    def wait(self, seconds: float) -> bool:
        """Whether there is an alarm, at the latest after so long."""
        return self._known.wait(seconds)
