#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv in the repository with everything that training on CPU and the tests need.
# Needs Python >= 3.10 with venv, nothing else. Does nothing when it is already up to date.
# PYTHON chooses the interpreter: PYTHON=python3.12 bash scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Only what is installed here counts: no user site, no inherited search path, no pip target of another environment.
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX

TORCH="torch==2.13.0"
CPU_INDEX="https://download.pytorch.org/whl/cpu"
python=".venv/bin/python"
stamp=".venv/.distca-setup"

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3 python}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python >= 3.10 with the venv module found (tried ${PYTHON:-python3.x, python3, python});" \
        "install one or name it: PYTHON=/path/to/python3.11 bash scripts/setup.sh" >&2
    return 1
}

# Made anew where there is none, it is broken, or the repository was moved: its commands carry the old path.
if ! "$python" -c 'import pip' 2>/dev/null || ! grep -qF "$(pwd -P)/.venv/bin/python" .venv/bin/pip; then
    interpreter="$(find_python)"
    echo "setup: making .venv with $("$interpreter" --version)"
    "$interpreter" -m venv --clear .venv
fi

# What the environment was made from: when that is unchanged there is nothing to do.
wanted="$(cat setup.py scripts/setup.sh | cksum) $("$python" --version)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    exit 0
fi

pip() { "$python" -m pip --quiet "$@"; }

if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "setup: installing $TORCH"
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        pip install "$TORCH"
    else
        # Without a GPU the CPU build spares gigabytes of CUDA; where its index cannot be reached, take what pip has.
        pip install --retries 1 --timeout 20 --extra-index-url "$CPU_INDEX" "$TORCH" || pip install "$TORCH"
    fi
fi
echo "setup: installing deepspeed_distca and what its tests need"
pip install -e ".[dev]"
echo "$wanted" >"$stamp"
echo "setup: ready (.venv)"
