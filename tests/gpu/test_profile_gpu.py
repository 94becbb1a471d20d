# SPDX-License-Identifier: Apache-2.0
"""The cost model measured on this GPU predicts calls that it was not fitted to, and says how well."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.cli import main
from deepspeed_distca.scheduler.profiles import Profile

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(180)
def test_the_median_error_is_at_most_a_tenth(tmp_path, monkeypatch, capsys) -> None:
    results = []
    monkeypatch.setattr("deepspeed_distca.commands.profile.print_result", lambda r, console: results.append(r))
    path = tmp_path / "quick.json"
    assert main(["profile", "--quick", "--save", str(path)]) == 0, capsys.readouterr().err
    (result,) = results
    for phase, error in result.held_out.items():
        print(phase, error)
        assert error.median <= 0.10, (phase, error)
    stored = Profile.load(path)
    assert stored == result.profile and stored.setting.device == torch.cuda.get_device_name()
    assert stored.cost.launch < stored.cost.forward.pair * 4096**2
