# SPDX-License-Identifier: Apache-2.0
"""What ranks say to each other beside their rows: who talks to whom, and when.

1. At initialize or attach, once: every rank leaves a note in torch's store and reads all others (``hello``).
2. At the beginning of each training micro-batch: all ranks send each other one message of integers over a gloo group,
   their documents, targets or error (``messages``), and see the micro-batch as a whole (``agreement``).
3. All the time, beside training, on two threads of each process: the one writes this rank's sign of life into the
   store and reads the alarm and one neighbour's sign (``lookout``, ``signs``); the other waits for an alarm, then ends
   this process's waits, or the process (``guard``). Neither says anything to training but by ``alarm``.
4. Training says where it is (``position``), and that it has failed, through ``watch``, which starts the two threads.

The store (``store``) is reached by the lookout's thread alone after the hello. What is raised is in ``errors``.
"""
