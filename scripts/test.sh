#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, then runs the tests. Arguments go to pytest: bash scripts/test.sh tests/data -k collator
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

export PYTHONNOUSERSITE=1 PATH="$PWD/.venv/bin:$PATH"
unset PYTHONPATH PYTHONHOME
exec python -m pytest "$@"
