#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, then trains a small HuggingFace Llama on the sources of the Python standard library with core attention
# balanced over all ranks: two CPU ranks, or every GPU of the machine. Arguments go to the training script:
#   bash scripts/train.sh --steps 50 --deepspeed_config configs/ds_config/zero3.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

export PYTHONNOUSERSITE=1 PATH="$PWD/.venv/bin:$PATH"
unset PYTHONPATH PYTHONHOME
# DeepSpeed still calls collectives by names that this PyTorch deprecates; nothing to act on.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::FutureWarning}"
gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if ((gpus == 0)); then
    # Two ranks share the cores; DeepSpeed would otherwise search for an accelerator and warn.
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(((($(nproc) + 1)) / 2))}"
fi
exec deepspeed --quiet --num_accelerators "$((gpus > 0 ? gpus : 2))" examples/hf_llama/train.py \
    --deepspeed --deepspeed_config configs/ds_config/zero1.json "$@"
