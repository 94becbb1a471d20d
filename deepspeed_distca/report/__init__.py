# SPDX-License-Identifier: Apache-2.0
"""Reports as one HTML file each, which needs no network: figures are SVG in the page."""

from deepspeed_distca.report.run import write_run

__all__ = ["write_run"]
