#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, then runs the tests, with what took longest at the end:
#   bash scripts/test.sh                          all of them, but those marked slow
#   bash scripts/test.sh --quick                  one of each kind of those that start processes, and all others
#   bash scripts/test.sh --slow                   all
#   bash scripts/test.sh tests/data -k collator   what pytest is told, in one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

export PYTHONNOUSERSITE=1 PATH="$PWD/.venv/bin:$PATH"
# Compiled modules are kept: there are dozens of processes, which would all compile the package again.
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
case "$*" in
    # Ranks wait for each other most of the time: more workers than cores.
    "" | --slow) exec python -m pytest -n "$(($(nproc) * 3 / 2 + 1))" --durations=25 "$@" ;;
    --quick) exec python -m pytest -n "$(nproc)" --durations=25 --quick ;;
    *) exec python -m pytest "$@" ;;
esac
