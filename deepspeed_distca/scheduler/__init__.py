# SPDX-License-Identifier: Apache-2.0
"""Which server computes what: the cost model, balancing, plans and their digest. NumPy only, never torch."""

from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.tasks import Tasks, home_tasks

__all__ = ["CostModel", "Heads", "Tasks", "balance", "home_tasks"]
