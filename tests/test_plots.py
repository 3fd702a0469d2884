"""The pictures of a run, where there can be none."""

PLOTS = "from pathlib import Path; from training.report.plots import plot_loss; print(plot_loss(%s, Path('never.png')))"
ENTRY = {"step": 1, "loss": 3.0, "tokens": 64, "learning_rate": 1e-3}


def test_a_matplotlib_that_does_not_work_ends_no_run(launch):
    drawn = launch("-c", PLOTS % [ENTRY], MPLBACKEND="nothing")
    assert (drawn.stdout, drawn.stderr) == ("False\n", "")
