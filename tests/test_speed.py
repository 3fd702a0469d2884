"""What is measured of a run's speed, by a clock that the test sets."""

import gc
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from conftest import TINY, flags
from modeling_gpt2scratch import GPT2ScratchConfig, GPT2ScratchForCausalLM
from training.budget.throughput import measure_speed
from training.checkpoints.metrics import read_events, seconds_until
from training.checkpoints.run_folder import RunFolder
from training.checkpoints.samples import write_samples
from training.checkpoints.status import hours, record
from training.config import read_config
from training.log.speed import Speed, in_words, peak_memory
from training.preflight import make_plan, setup_of
from training.report.facts import begin_report
from training.report.plots import plot_loss
from training.report.report import write_report
from training.runtime.device import Setup, describe


def count_models() -> int:
    return [type(each) for each in gc.get_objects()].count(GPT2ScratchForCausalLM)


@pytest.fixture
def clock(monkeypatch):
    """A clock whose `now` (seconds) only the test advances."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("training.log.speed.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def speed(monkeypatch, peak: float | None, processes: int = 1) -> Speed:
    monkeypatch.setattr("training.log.speed.peak_flops", lambda name, precision: peak)
    monkeypatch.setattr("training.log.speed.peak_memory", lambda device: 11_249_000_000)
    accelerator = SimpleNamespace(device=torch.device("cpu"), mixed_precision="bf16", num_processes=processes)
    return Speed(SimpleNamespace(seconds=0.0), GPT2ScratchConfig(), accelerator)  # 685,375,488 operations per token


@pytest.mark.parametrize("processes", [1, 8])
def test_measurements_of_a_log_line(clock, monkeypatch, processes):
    it, tokens_per_step = speed(monkeypatch, 989.4e12, processes), processes * 32_768
    assert it.measured(tokens_per_step) == {"peak_memory_gb": 11.249}  # before the first step
    assert in_words(it.measured(tokens_per_step)) == "peak 11.2 GB"
    for _ in range(10):
        it.steps += 1
    it.batches.seconds = 0.003
    clock.now = 0.48
    numbers = {"tokens_per_second": processes * 682_666.7, "seconds_per_step": 0.048}
    numbers |= {"mfu": 0.4729, "data_share": 0.0063, "peak_memory_gb": 11.249}  # of one device
    assert it.measured(tokens_per_step) == pytest.approx(numbers)
    if processes == 1:
        words = "682,667 tok/s  0.0480 s/step  MFU 47%  data  0.6%  peak 11.2 GB"
        assert in_words(it.measured(tokens_per_step)) == words


def test_pauses_and_earlier_time_do_not_count(clock, monkeypatch):
    it = speed(monkeypatch, None)
    clock.now, it.batches.seconds = 100.0, 50.0  # of the first step
    it.restart()
    it.steps += 1
    clock.now += 2
    with it.pause():
        clock.now += 60
    it.batches.seconds += 0.5
    assert (it.measured(1000)["tokens_per_second"], it.measured(1000)["seconds_per_step"]) == (500.0, 2.0)
    assert it.measured(1000)["data_share"] == 0.25


def test_no_model_is_left_of_a_measurement(store):
    """`gc.freeze()` would keep one for the whole run. With mixed precision, Accelerate puts it into a cycle."""
    config = read_config(flags(**TINY | {"data": store.folder, "mixed_precision": "bf16"}))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plan = make_plan(config, store, store.load_tokenizer(), accelerator, setup_of(config))
    gc.collect()
    before = count_models()
    measure_speed(config, plan, accelerator, store, steps=2, seconds=0.01)
    assert count_models() == before


def test_the_device_line_names_the_peak(monkeypatch):
    accelerator = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    for name, peak in (("NVIDIA H100 80GB HBM3", "989.4 TFLOP/s"), ("H1000", "MFU unknown")):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        line = describe(accelerator, Setup("bf16", True, "eager", ()), GPT2ScratchConfig())
        assert line == f"{name} ({peak}), bf16, compiled, 1 process, attention: eager"
    assert 50e6 < peak_memory(torch.device("cpu")) < 1e12  # torch alone needs more than 50 MB


EVENTS = """\
{"time": "2026-01-01T10:00:00+00:00", "event": "begun", "step": 0}
{"time": "2026-01-01T11:00:00+00:00", "event": "saved", "step": 500}
{"time": "2026-01-03T08:00:00+00:00", "event": "resumed", "step": 500}
{"time": "2026-01-03T08:15:00+00:00", "event": "saved", "step": 600}
"""


ENDED = ((8, "backup_failed"), (9, "backup_failed"))


def test_a_truncated_event_hides_no_later_one_and_hours_exclude_time_between_starts(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": "2026-01-01T10:0')
    record(path, "saved", 5, seconds=0.1)
    assert [(event["event"], event["step"]) for event in read_events(path)] == [("saved", 5)]
    path.write_text(EVENTS)
    events = read_events(path)
    assert hours(events, datetime(2026, 1, 3, 8, 30, tzinfo=UTC)) == 1.5
    assert hours(events, datetime(2026, 1, 2, 8, 30, tzinfo=UTC)) == 1.25  # the clock was set back
    for event, clock in zip(events, (0.0, 1800.0, 10.0, 910.0), strict=True):
        event["clock"] = clock
    assert hours(events, datetime(2026, 1, 3, 8, 30, tzinfo=UTC), 1810.0) == 1.0  # without half an hour of sleep
    events += [{"time": f"2026-01-{day:02}T08:15:00+00:00", "event": name} for day, name in ENDED]
    assert hours(events) == hours(events[:-2]) == 0.75
    assert hours([], datetime(2026, 1, 3, 8, 30, tzinfo=UTC)) == 0


@pytest.mark.parametrize(
    ("first_step", "steps", "seconds"),
    [(0, [40, 50], [10, 20]), (0, [40, 80, 90], [10, 20, 30]), (400, [440, 480], [10, 20])],  # the last is a branch
)
def test_training_seconds_count_the_steps_before_the_first_log_line(first_step, steps, seconds):
    speeds = {40: 4, 80: 4, 440: 4, 480: 4}
    entries = [{"step": step, "tokens": step, "tokens_per_second": speeds.get(step, 1)} for step in steps]
    entries.insert(1, {"step": (steps[0] + steps[1]) / 2, "eval_loss": 1.0})  # between two log lines
    expected = [seconds[0], (seconds[0] + seconds[1]) / 2, *seconds[1:]]
    assert seconds_until(entries, first_step) == dict(zip([entry["step"] for entry in entries], expected, strict=True))


def test_report_summarizes_the_log_lines(store, tmp_path):
    folder = RunFolder(tmp_path)
    lines = ['{"step": 1, "loss": 9.0, "tokens": 64, "peak_memory_gb": 10.9, "seconds_to_first_step": 41.3}']
    lines += [
        f'{{"step": {2 + i}, "loss": 5.0, "tokens": {128 + 64 * i}, "tokens_per_second": {600_000 + 10_000 * i}, '
        f'"mfu": {0.4 + i / 100}, "data_share": 0.0012, "peak_memory_gb": 11.249}}'
        for i in range(11)
    ]
    folder.metrics.write_text("\n".join(lines) + "\n")
    write_samples(folder.samples, 0, [("Äther", " und Zeit")])
    begin_report(folder, GPT2ScratchConfig(), 134_601_216, store.metadata)
    for data, text in (
        *(("data/mine", "data/mine"), ("/home/me/mine", "path/to/mine"), ("../../me/mine", "path/to/mine")),
        (Path.cwd() / "data" / "my texts", "'data/my texts'"),
    ):
        folder.config.write_text(f"data: {data}\n")
        write_report(folder)
        assert f" --config config.yaml --data {text}\n" in folder.report.read_text()
    assert 'tokenizer("Äther und ", return_tensors="pt")' in folder.report.read_text()
    section = folder.report.read_text().split("## Speed\n\n")[1].split("\n\n## ")[0]
    for part in (
        "| tokens per second | 650,000 | 610,000 to 690,000 |",
        "| model FLOPs utilization (MFU) | 45.0% | 41.0% to 49.0% |",
        "| share of time spent making batches | 0.12% | 0.12% to 0.12% |",
        "\nOver 11 log lines. Peak memory 11.2 GB; 41.3 s to the first step.\n",
        "MFU compares 685.4 MFLOP per token",
        "As counted by PaLM and nanoGPT (12 L C T), it would be 46.9%.",
    ):
        assert part in section


def test_report_names_the_hardware_of_each_part_of_the_run(store, tmp_path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("data: data/mine\n")
    folder.metrics.write_text('{"step": 1, "loss": 9.0, "tokens": 64}\n')
    begin_report(folder, GPT2ScratchConfig(), 134_601_216, store.metadata)

    def report_after(*details: dict) -> str:
        for event in details:
            record(folder.events, "resumed" if event["step"] else "begun", **event)
        write_report(folder)
        return folder.report.read_text().split("## Training\n\n")[1].split("\n\n")[0]

    assert report_after({"step": 0, "environment": "CPU"}) == "CPU."
    assert report_after({"step": 5, "environment": "CPU"}) == "CPU."
    # The GPU's steps after step 5 were lost: the run resumed from step 5 again.
    changes = ({"step": 5, "environment": "GPU"}, {"step": 5, "environment": "2 GPUs"})
    assert report_after(*changes) == "- after step 0: CPU\n- after step 5: 2 GPUs"
    folder.events.unlink()  # a branch of this run
    branch = {"step": 5, "environment": "TPU", "earlier": [{"step": 0, "environment": "CPU"}]}
    assert report_after(branch) == "- after step 0: CPU\n- after step 5: TPU"


PLOTS = "from pathlib import Path; from training.report.plots import *; print(plot_loss(%s, {1: 1}, Path('never.png')))"
ENTRY = {"step": 1, "loss": 3.0, "tokens": 64, "learning_rate": 1e-3}


def test_a_broken_matplotlib_does_not_end_a_run(launch):
    lines_on_screen = launch("-c", PLOTS % [ENTRY], MPLBACKEND="nothing")
    assert (lines_on_screen.stdout, lines_on_screen.stderr) == ("False\n", "")


def test_plots_do_not_use_the_latex_of_a_users_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.importorskip("matplotlib").rc_context({"text.usetex": True}):
        assert plot_loss([ENTRY], {1: 1}, tmp_path / "loss.png")
