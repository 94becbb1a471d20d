#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the site of docs/ into build/site; a warning, such as of a link that leads nowhere, is an error. Needs mkdocs-material
# (pip install -e .[docs], or of an environment of its own: PATH="$venv/bin:$PATH" bash scripts/docs.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! command -v mkdocs >/dev/null; then
    echo "docs: mkdocs was not found; install it: pip install mkdocs-material" >&2
    exit 1
fi
export NO_MKDOCS_2_WARNING=1 # about mkdocs' future, not about these pages
exec mkdocs build --strict "$@"
