# SPDX-License-Identifier: Apache-2.0
"""What planning takes where nobody says otherwise: of the ``distca`` block, the scheduler, the loader and the command
line, so that they do not differ."""

from __future__ import annotations

#: The largest load may exceed the mean by this share before work is moved, and after. Others wait for that share in
#: every layer; what a larger one saves is bytes, a few percent of them on up to 8 servers.
TOLERANCE = 0.005

#: Query rows a cut is rounded to: the tile of the flash-attention kernels.
GRANULARITY = 128

#: Share of a layer's predicted time that moving rows costs on GPUs, whatever is moved (docs/design.md, "When rows
#: move").
MIN_GAIN = 0.04
