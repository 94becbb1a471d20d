#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the sdist and from it the wheel, installs the wheel in an environment of its own, and tries it there, outside
# the checkout. Fetches nothing: what the package needs, and setuptools, are those of .venv.
# PYTHON names an environment that has them all: PYTHON=/path/to/python bash scripts/check_package.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
    bash scripts/setup.sh
    PYTHON="$PWD/.venv/bin/python"
fi
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work"/{source,dist,sdist,elsewhere}

# A copy, as a clone has it: what earlier builds left in the checkout would end up in the wheel.
git ls-files --cached --others --exclude-standard | while read -r file; do
    if [[ -f "$file" ]]; then echo "$file"; fi
done >"$work/files"
tar -cf - -T "$work/files" | tar -xf - -C "$work/source"

echo "check_package: building"
(cd "$work/source" && "$PYTHON" -c 'from setuptools import build_meta; build_meta.build_sdist("../dist")') \
    >"$work/log" 2>&1 || { cat "$work/log" && exit 1; }
tar -xzf "$work"/dist/*.tar.gz -C "$work/sdist" --strip-components 1
(cd "$work/sdist" && "$PYTHON" -m pip --quiet wheel --no-build-isolation --no-deps --no-index -w ../dist .)

same() { # what should be there, and what is there
    diff <(sort "$2") <(sort "$3") >"$work/diff" && return
    echo "check_package: $1 is not complete, or has more than it should (< is missing, > is too much):" >&2
    grep '^[<>]' "$work/diff" >&2
    return 1
}
grep -v '^\.' "$work/files" >"$work/wanted" # all but what is for git and its hosts
tar -tzf "$work"/dist/*.tar.gz | grep -v '/$' | cut -d/ -f2- | grep -vE '^(PKG-INFO|setup.cfg|[^/]*\.egg-info/.*)$' \
    >"$work/found"
same "the sdist" "$work/wanted" "$work/found"
grep '^deepspeed_distca/' "$work/files" >"$work/wanted"
"$PYTHON" -c 'import sys, zipfile; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep="\n")' "$work"/dist/*.whl |
    grep -v '\.dist-info/' >"$work/found"
same "the wheel" "$work/wanted" "$work/found"

echo "check_package: installing"
"$PYTHON" -m venv --without-pip "$work/env"
paths='import sysconfig; print(*dict.fromkeys(sysconfig.get_path(f"{kind}lib") for kind in ("pure", "plat")), sep="\n")'
# The other environment's packages, behind its own; an editable install there has no effect here.
"$PYTHON" -c "$paths" >"$work/others"
cp "$work/others" "$("$work/env/bin/python" -c "$paths" | head -n 1)/others.pth"
"$work/env/bin/python" -m pip --quiet install --no-deps --no-index --ignore-installed --no-compile "$work"/dist/*.whl

cd "$work/elsewhere"
echo "check_package: trying"
"$work/env/bin/ds_distca" --help >help
grep -q profile help
cat >layout.json <<'JSON'
{"ranks": [[{"document": 0, "start": 0, "length": 4096}], [{"document": 1, "start": 0, "length": 2048},
 {"document": 2, "start": 0, "length": 2048}]], "heads": {"query": 8, "key_value": 2, "head_dim": 64}}
JSON
"$work/env/bin/ds_distca" plan --layout layout.json --cost area --json >plan.json
"$work/env/bin/python" - "$work/env" <<'PYTHON'
import importlib.metadata
import json
import sys
from pathlib import Path

import deepspeed_distca
from deepspeed_distca.scheduler import Heads
from deepspeed_distca.scheduler.profiles import Setting, choose

folder = Path(deepspeed_distca.__file__).resolve().parent
assert folder.is_relative_to(Path(sys.argv[1]).resolve()), f"imported from {folder}"
about = importlib.metadata.metadata("deepspeed_distca")
assert about["Version"] == deepspeed_distca.__version__, about["Version"]
assert (folder / "py.typed").is_file()
choice = choose(Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16"), Heads(32, 8, 128), folder=None)
assert choice.source == "shipped for NVIDIA H200", choice.source
plan = json.loads(Path("plan.json").read_text())
assert plan["balance_before"] > 1.3 and plan["balance_after"] < 1.05, plan
print(f"check_package: {about['Name']} {about['Version']} works as installed")
PYTHON
