"""Correction of the length of a run with a budget, so that it ends at the budget."""

import time
from statistics import median

from common.atomic import write_atomic
from training.budget.forecast import Forecast
from training.budget.throughput import SCORING_COST, Throughput
from training.checkpoints.status import record
from training.config import TrainConfig, dump_config
from training.log.run_log import RunLog
from training.plan.run import Run
from training.runtime.distributed import on_main
from training.step.optim import SECOND_TARGET_SHARE

FINAL = 0.35  # part of the steps after which their number is final; the rates fall from 40% on
PAUSE = [False, True, False]  # whether three log lines are slow
SPARE = 0.01  # part of the time left that is kept for variations of speed


class Pacer:
    """Corrects the number of steps by the measured speed. Used by every process.

    Until `FINAL` of the steps are done, their number is an estimate. It then becomes part of config.yaml and of the
    checkpoints, and no resumed run changes it.
    """

    def __init__(self, run: Run, config: TrainConfig, forecast: Forecast):
        self.run, self.config, self.forecast = run, config, forecast
        # Time of the monotonic clock at which the run must end, or None if its length is final.
        self.deadline = forecast.sizing and forecast.sizing.deadline

    def config_yaml(self) -> str:
        """Return config.yaml. It has no length while that is an estimate: a resumed run measures again."""
        length = {} if self.deadline is None else {"max_steps": None}
        return dump_config(self.config.with_settings(length))

    def correct(self, step: int, log: RunLog) -> None:
        """Correct the length after `step` steps. Call it after the log line, checkpoint and validation of a step."""
        plan = self.run.plan
        if self.deadline is None or not (log.paces or step == plan.max_steps):  # nothing is measured yet
            return
        steps = on_main(self.run.accelerator, lambda: self._corrected(step, log))
        if step < plan.max_steps * (1 - self.config.optim.cooldown_fraction):
            plan.max_steps = steps
        elif step < plan.max_steps:  # the rates fall: with more steps, they would rise again
            plan.max_steps = min(plan.max_steps, steps)
        if step < FINAL * plan.max_steps:
            return
        self.deadline = None
        settings = {"max_steps": plan.max_steps} | self._earlier_end_of_second_targets()
        self.config = self.config.with_settings(settings | {"max_train_tokens": None})
        self.run.start.state.settings.update(settings)
        log.say(f"Budget:  the run has {plan.max_steps:,} steps, by the measured speed. This number is now final.")
        on_main(self.run.accelerator, lambda: self._write(step))

    def _corrected(self, step: int, log: RunLog) -> int:
        """Return the number of steps that fit into the time left, and that are useful with the text."""
        plan = self.run.plan
        if not log.paces:
            return plan.max_steps
        usual = median(seconds / steps for steps, seconds in log.paces)
        is_slow = [False, *(seconds > 4 * usual * steps for steps, seconds in log.paces), False]
        # Without single slow lines, which are pauses. Two may be those of a slower machine.
        lines = zip(log.paces, is_slow, is_slow[1:], is_slow[2:], strict=False)
        lines = [pace for pace, *slow in lines if slow != PAUSE]
        steps, seconds = map(sum, zip(*lines, strict=True))
        speed = Throughput(plan.tokens_per_step * steps / seconds, "")
        last = SCORING_COST * self.forecast.store.metadata.val.tokens / speed.tokens_per_second  # of the whole split
        validations = (self.forecast.seconds(speed, tokens=0) - last) / plan.max_steps  # seconds of each step
        room = (1 - SPARE) * (self.deadline - time.monotonic()) - last
        step_limit = self.forecast.sizing.option.most_tokens / plan.tokens_per_step
        return max(step + 1, int(min(step_limit, step + room / (seconds / steps + validations))))

    def _earlier_end_of_second_targets(self) -> dict[str, int]:
        """Return `second_target_steps` if the final length is less than the first estimate, from which they were
        chosen: second targets would count for too long, or up to the end."""
        last = max(1, round(SECOND_TARGET_SHARE * self.run.plan.max_steps))
        resumes = "resume_from_checkpoint" in self.config.flags  # from a file with the choice itself
        is_given = "second_target_steps" in self.config.flags | (set() if resumes else self.config.in_file)
        is_late = not is_given and (self.config.optim.second_target_steps or 0) > last
        return {"second_target_steps": last} if is_late else {}

    def _write(self, step: int) -> None:
        write_atomic(self.run.folder.config, self.config_yaml())
        record(self.run.folder.events, "paced", step, max_steps=self.run.plan.max_steps)
