# SPDX-License-Identifier: Apache-2.0
"""DistCACallback: the plugin's statistics in Trainer's logs, and in those of whom it reports to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.huggingface import trainer_callback
from tests.distributed.harness import run_ranks
from tests.huggingface.trainer_callback_worker import EVALUATED, EVERY, STEPS

MEANS = ("balance_before", "balance_after", "moved_share")
MEASURED = ("estimated_gain", "tokens_per_second")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(
        "tests.huggingface.trainer_callback_worker:run", 2, folder=str(tmp_path_factory.mktemp("trainer"))
    )


def test_logs_and_reports_have_means_since_the_last_log(ranks) -> None:
    for rank in ranks:
        steps, history = rank["with"]["steps"], rank["with"]["history"]
        reported = [log for log in rank["with"]["reported"] if "loss" in log]
        logged = [log for log in history if "loss" in log]
        assert len(steps) == STEPS and len(reported) == len(logged) == STEPS // EVERY
        for index, log in enumerate(reported):
            of_log = steps[index * EVERY : (index + 1) * EVERY]
            for name in MEANS:
                assert log[f"distca_{name}"] == pytest.approx(sum(s[name] for s in of_log) / EVERY), name
            assert log["distca_balance_before"] >= log["distca_balance_after"] >= 1.0
            moved = log["distca_moved_share"] > 0.0
            assert moved == (log["distca_balance_before"] > log["distca_balance_after"])
            assert log["distca_tokens_per_second"] > 0.0
            assert {k: v for k, v in logged[index].items() if "distca" in k} == {
                k: v for k, v in log.items() if "distca" in k
            }
        assert any(log["distca_moved_share"] and log["distca_estimated_gain"] > 0.0 for log in reported)
    # What ranks share is the same on all of them.
    assert [[log[f"distca_{n}"] for n in MEANS] for log in ranks[0]["with"]["history"] if "loss" in log] == [
        [log[f"distca_{n}"] for n in MEANS] for log in ranks[1]["with"]["history"] if "loss" in log
    ]


def test_evaluations_and_runs_without_the_block_have_none(ranks) -> None:
    for rank in ranks:
        logs = [*rank["with"]["reported"], *rank["with"]["history"]]
        evaluations = [log for log in logs if "eval_loss" in log]
        assert len(evaluations) == 2 * (STEPS // EVALUATED)
        others = [*evaluations, *rank["without"]["reported"], *rank["without"]["history"]]
        assert not any("distca" in key for log in others for key in log)


class Clock:
    """A runtime, an engine and a trainer as far as the callback looks, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        statistics = StepStatistics(1.5, 1.0, predicted_server_seconds=[0.1, 0.3], tokens=100, moved_share=0.25)
        runtime = SimpleNamespace(server=SimpleNamespace(planned=statistics))
        handler = SimpleNamespace(callbacks=["reports"])
        trainer = SimpleNamespace(model_wrapped=SimpleNamespace(distca=runtime), callback_handler=handler)
        self.callback = trainer_callback.DistCACallback(trainer)
        handler.callbacks.append(self.callback)
        self.callback.on_train_begin(None, None, None)
        assert handler.callbacks == [self.callback, "reports"]
        monkeypatch.setattr(trainer_callback, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.callback.on_step_end(None, None, None)

    def log(self) -> dict[str, float]:
        logs = {"loss": 1.0}
        self.callback.on_log(None, SimpleNamespace(log_history=[{}]), None, logs=logs)
        return {key.removeprefix("distca_"): value for key, value in logs.items()}


def test_by_the_time_of_training_alone(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    clock.step(30.0)  # the first one
    assert not set(MEASURED) & set(clock.log())
    clock.step(1.0)
    clock.step(3.0)
    # Two steps of 100 tokens in 4 s, in each of which (1.5 - 1.0) x 0.2 s of attention were saved.
    assert clock.log() == pytest.approx(
        {"loss": 1, "balance_before": 1.5, "balance_after": 1.0, "moved_share": 0.25}
        | {"estimated_gain": 0.05, "tokens_per_second": 50}
    )
    clock.callback.on_evaluate(None, None, None)
    clock.step(500.0)
    clock.step(2.0)
    clock.callback.on_save(None, None, None)
    clock.step(500.0)
    assert clock.log()["tokens_per_second"] == pytest.approx(50)
