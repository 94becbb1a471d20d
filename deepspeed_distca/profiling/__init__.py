# SPDX-License-Identifier: Apache-2.0
"""``ds_distca profile``: measures attention kernels and links, and fits the cost model to them."""
