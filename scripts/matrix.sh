#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The quick lane of the tests with other versions of torch, transformers and DeepSpeed, each set in an environment of
# its own that is deleted afterwards:
#   bash scripts/matrix.sh                    the oldest that setup.py allows, then the newest that pip finds
#   bash scripts/matrix.sh oldest             one of them
#   bash scripts/matrix.sh torch==2.12.0      what is named, and the newest of all else
# PYTHON chooses the interpreter (python3). torch comes from pip's own index; for CPU builds, which spare gigabytes,
# set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
#
# Tried 2026-11-30 on CPUs with Python 3.11: newest (torch 2.14.1, transformers 5.24.0, DeepSpeed 0.19.8) passed, 2285
# tests. oldest (torch 2.11.0, transformers 5.17.0, DeepSpeed 0.19.8): 2400 passed, and 4 failed that failed with the
# newest as well and were mended.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

try() { # a name, and requirements beside those of setup.py
    local name="$1" python="$work/env/bin/python"
    shift
    # What DeepSpeed builds with one torch does not load with another.
    export TORCH_EXTENSIONS_DIR="$work/extensions-$name"
    echo "matrix: $name: installing ${*:-the newest}"
    "${PYTHON:-python3}" -m venv --clear "$work/env"
    "$python" -m pip --quiet install -e ".[dev]" "$@"
    "$python" -m pip list 2>/dev/null | grep -E '^(torch|transformers|deepspeed|numpy) '
    # What a type checker finds depends on the libraries it reads: the newest ones are tests/test_lint.py's.
    PATH="$work/env/bin:$PATH" "$python" -m pytest -n "$(nproc)" --quick --ignore tests/test_lint.py -rf
}

oldest() { # "torch>=2.11" of setup.py is torch==2.11.*
    sed -nE 's/^ +"(torch|transformers|deepspeed)>=([0-9.]+)",$/\1 \2/p' setup.py | while read -r library version; do
        [[ "$version" == *.*.* ]] || version+=".*"
        echo "$library==$version"
    done
}

failed=()
run() { try "$@" || failed+=("$1"); }
case "${1:-both}" in
    both)
        mapfile -t versions < <(oldest)
        run oldest "${versions[@]}"
        run newest
        ;;
    oldest)
        mapfile -t versions < <(oldest)
        run oldest "${versions[@]}"
        ;;
    newest) run newest ;;
    *) run "$*" "$@" ;;
esac
if ((${#failed[@]})); then
    echo "matrix: failed with ${failed[*]}" >&2
    exit 1
fi
echo "matrix: all passed"
