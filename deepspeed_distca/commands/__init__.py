# SPDX-License-Identifier: Apache-2.0
"""The commands of ``ds_distca``, one in a file: `add_arguments(parser)` and `run(arguments)`."""
