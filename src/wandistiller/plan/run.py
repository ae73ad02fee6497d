"""The job of ``wandistiller plan``: make the plan, print it, write it, prove it."""

from __future__ import annotations

from dataclasses import dataclass

from wandistiller.config.plan import PlanRequest
from wandistiller.config.toml_file import write_config
from wandistiller.files import check_can_write
from wandistiller.plan.planner import Plan, make_plan
from wandistiller.plan.show import as_json, show
from wandistiller.plan.verify import Comparison, check_can_verify, show_comparisons, verify
from wandistiller.terminal import say


@dataclass(frozen=True)
class Planned:
    """A plan, and what the command ends with: 1 if nothing fits, or if more was held than was predicted."""

    plan: Plan
    comparisons: tuple[Comparison, ...] = ()

    @property
    def exit_code(self) -> int:
        return 0 if self.plan.best is not None and all(each.is_within for each in self.comparisons) else 1


def run_plan(request: PlanRequest) -> Planned:
    """Do the whole job."""
    request.check()
    options = request.options
    if options.write is not None:
        check_can_write(options.write)
    if options.verify:
        check_can_verify()
    plan = make_plan(request)
    if not options.json:
        show(plan, top=options.top)
    if options.write is not None:
        if plan.best_job is not None:
            line = f"wandistiller {request.command} --config {options.write.name}"
            write_config(options.write, plan.best_job, request.command, plan.launched(line))
        if not options.json:
            line = f"wandistiller {request.command} --config {options.write}"
            run = f"Wrote {options.write}; run it with: {plan.launched(line)}"
            say(run if plan.best_job is not None else f"Nothing was written to {options.write}, as nothing fits.")
    comparisons = verify(plan) if options.verify and (plan.best is not None or not options.json) else []
    if options.json:
        print(as_json(plan, top=options.top, comparisons=comparisons))
    elif options.verify:
        show_comparisons(comparisons)
    return Planned(plan, tuple(comparisons))
