# SPDX-License-Identifier: Apache-2.0
"""Text to train on: the sources of the Python standard library, which every machine has, or a folder of yours.

Each file is one document. Their lengths have a long tail, as those of real corpora have.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".py", ".txt", ".md", ".rst")
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def load_texts(folder: str | None, limit: int, seed: int) -> list[str]:
    """Up to ``limit`` texts, in an order that depends on ``seed`` only; None for the standard library.

    Raises:
        SystemExit: no text in the folder.
    """
    root = folder or sysconfig.get_paths()["stdlib"]
    paths = sorted(text_files(root, skip=set() if folder else NOT_THE_LIBRARY))
    random.Random(seed).shuffle(paths)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths[:limit]]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise SystemExit(f"no text in {root}: looked for files that end in {', '.join(SUFFIXES)}")
    return texts


def text_files(root: str, skip: set[str]) -> Iterator[Path]:
    """Text files below ``root``, without the folders named in ``skip``."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - skip  # os.walk does not enter what is taken out here
        yield from (Path(folder, name) for name in names if name.endswith(SUFFIXES))
