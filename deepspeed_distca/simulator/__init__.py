# SPDX-License-Identifier: Apache-2.0
"""A training step of any number of ranks, predicted by what plans in training. NumPy; never torch."""
