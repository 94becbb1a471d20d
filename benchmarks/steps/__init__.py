# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmark of whole steps: its batches, variants, measurement and report."""
