# SPDX-License-Identifier: Apache-2.0
"""``ds_distca profile``: measures attention kernels and links, and fits the cost model to them. And how fast devices
are against each other, for `server_weights`."""
