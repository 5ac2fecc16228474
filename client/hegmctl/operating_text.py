"""Operations as text: a progress bar, a sentence about the result, plans, lists and histories.

Longer than 400 lines because all of them describe processes and their journeys in the same words.
"""

from __future__ import annotations

from time import localtime, strftime

from hegmctl.quantities import binary_size
from hegmctl.tables import UNKNOWN, Column, Style, printable, table, wrapped
from hegmd.protocol.operations import PHASES_IN_ORDER, RESTART_STEPS, WAITS_IN_QUEUE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from hegmctl.tables import Cell
    from hegmd.protocol.messages import Drained, Dropped, OperationReply, OperationsReply, OrphansReply, StoryReply
    from hegmd.protocol.operations import Operation, OperationProcess, OperationProgress, Orphan, Plan, PlannedProcess

BAR_COLUMNS = 24
_MOVING = ("reading", "offloading", "handing", "spilling", "reloading", "sealing")
# The phases in which an operation has reached its goal and waits for another request.
AT_REST = ("suspended", "holding")
_OVER = ("done", "suspended", "rolled-back", "lost")
_ONLY_A_PLAN = "nothing was changed: this is only the plan"
_COLOURS = {"done": "green", "suspended": "yellow", "rolled-back": "red", "lost": "red"}
_STATES = {
    "running": "runs",
    "parked": "is parked at a boundary",
    "out": "is parked, its bytes are in the pool",
    "gone": "has ended",
    "lost": "has ended while its bytes were offloaded",
}
# The bar treats these phases as others. While an image is sealed the job continues, and most of it is still to be
# written. A restored job has just started.
_LIKE = {"sealing": "tidying", "suspended": "planned"}
# The part of the bar where a restart saves its state, and the part of each step after that: the new process takes most
# of the time.
_RESTART_FROM, _RESTART_STEP = 0.4, 0.09


def _words(phase: str) -> str:
    """Return the phase without hyphens."""
    return phase.replace("-", " ")


def progress_text(progress: OperationProgress, style: Style) -> list[str]:
    """Return one line: the current step with its progress and bytes; or what it waits for, without colours."""
    phase = progress.phase
    if progress.waits is not None and phase == WAITS_IN_QUEUE:
        return [printable(f"the job waits: {progress.waits.why}; next: {progress.waits.next}")]
    if progress.waits is not None:
        what = f"operation {progress.id}: {_words(phase)}" if progress.id else "hegmd"
        return [printable(f"{what} waits: {progress.waits.why}; next: {progress.waits.next}")]
    if progress.doing in RESTART_STEPS:
        return [
            _bar(progress, _RESTART_FROM + RESTART_STEPS.index(progress.doing) * _RESTART_STEP, progress.doing, style)
        ]
    moving = phase in _MOVING and progress.size_bytes > 0
    step = _LIKE.get(phase, phase)
    place = PHASES_IN_ORDER.index(step) if step in PHASES_IN_ORDER else len(PHASES_IN_ORDER)
    within = min(1.0, progress.moved_bytes / progress.size_bytes) if moving else 0.0
    size = f"  {binary_size(progress.moved_bytes)} of {binary_size(progress.size_bytes)}" if moving else ""
    what = f"{_words(phase)}{size}" if progress.doing is None else progress.doing
    return [_bar(progress, (place + within) / len(PHASES_IN_ORDER), what, style)]


def _bar(progress: OperationProgress, share: float, what: str, style: Style) -> str:
    full = BAR_COLUMNS if share >= 1 else min(round(share * BAR_COLUMNS), BAR_COLUMNS - 1)  # full at the end only
    bar = "#" * full + "." * (BAR_COLUMNS - full)
    name = f"operation {printable(progress.id)}  " if progress.id else ""  # a dry run has no operation
    return f"{name}[{style.paint(bar, 'cyan')}]  {printable(what)}"


def job_names(processes: Iterable[OperationProcess | PlannedProcess], *, ids: bool = True) -> list[str]:
    """Return the jobs of these processes by name and id, each once; the pid of a process without a job."""
    return list(dict.fromkeys(_job_name(process, ids=ids) for process in processes))


def _job_name(process: OperationProcess | PlannedProcess, *, ids: bool = True) -> str:
    if process.job is None:
        return str(process.pid)
    name = process.job_name or process.job
    return f"{name} ({process.job})" if ids and process.job_name else name


def operation_text(reply: OperationReply, style: Style) -> list[str]:
    if reply.recovered is not None:
        job = printable(reply.recovered)
        return [f"job {job} had failed, and is started again from its newest snapshot: hegmctl recovery {job}"]
    return [] if reply.operation is None else outcome(reply.operation, style)


def outcome(operation: Operation, style: Style) -> list[str]:
    """Return the result or the state in one line. After a failure or while a person has to act: why, and what to do."""
    who = ", ".join(job_names(operation.processes))
    phase = style.paint(printable(_words(operation.phase)), _COLOURS.get(operation.phase, "cyan"))
    kind = printable(operation.kind)
    by = " by restart" if operation.way == "restart" else ""
    line = f"operation {printable(operation.id)}: {kind} of {printable(who)}{by}: {phase}{_figures(operation)}"
    more: list[str] = []
    if operation.doing is not None:
        more.append(f"now: {printable(operation.doing)}")
    if operation.note is not None:
        more.append(printable(operation.note))
    if operation.failure is not None:
        more.append(printable(operation.failure.message))
        more.append(f"next: {printable(operation.failure.hint)}")
    if operation.waits is not None:
        cells = operation.failure is not None and operation.failure.message in operation.waits.why
        if not cells and operation.phase != "suspended":
            more.append(f"waits: {printable(operation.waits.why)}")
        more.append(f"next: {printable(operation.waits.next)}")
    if operation.failure is None and (operation.waits is None or operation.phase in AT_REST):
        return ["; ".join((line, *more))]
    return [line, *(f"  {part}" for part in more)]


def _figures(operation: Operation) -> str:
    # The downtime of a job from an image would include the time without a process.
    has_downtime = operation.downtime_s is not None and operation.kind != "restore"
    downtime = f"downtime {operation.downtime_s:.3f} s" if has_downtime else ""
    # Only images take much time while the job runs.
    is_telling = operation.kind in ("checkpoint", "restore") and operation.took_s is not None
    took = f"{operation.took_s:.1f} s in all" if is_telling else ""
    where = _routes(operation)
    cells = (where, binary_size(operation.size_bytes), _kept(operation), downtime, took)
    parts = [part for part in cells if part not in ("", operation.phase)]
    return f" ({', '.join(parts)})"


def _kept(operation: Operation) -> str:
    """Return what suspended processes with CUDA contexts keep on their GPUs; empty if none does."""
    kept = [process for process in operation.processes if process.stays_bytes]
    if operation.phase != "suspended" or not kept:
        return ""
    places = printable(", ".join(dict.fromkeys(process.began_on or UNKNOWN for process in kept)))
    return f"{binary_size(sum(process.stays_bytes or 0 for process in kept))} stays on {places}"


_TO = " -> "
_ENDED = ("ended", "lost")


def _routes(operation: Operation) -> str:
    """Return the sources and targets of the processes, or what became of them; each pair once, and who stays last."""
    found = dict.fromkeys(_route(operation, process) for process in operation.processes)
    moves = [route for route in found if _TO in route]
    others = [route for route in found if route not in moves]
    stays = [f"stays on {route}" if moves and route not in _ENDED else route for route in others]
    return printable(", ".join([*moves, *stays]))


def _route(operation: Operation, process: OperationProcess) -> str:
    """Return source and target. The pool is the place of a process that is on no GPU."""
    if process.state in ("gone", "lost"):
        return _ENDED[process.state == "lost"]
    here, began = process.gpu or "pool", process.began_on
    if operation.phase == "rolled-back":
        return here
    if operation.phase in ("done", "suspended"):
        return here if began in (None, here) else f"{began}{_TO}{here}"
    to = process.to or "pool"
    return here if here == to else f"{here}{_TO}{to}"


def plan_text(reply: OperationReply, style: Style) -> list[str]:
    if reply.recovered is not None:
        job = printable(reply.recovered)
        what = f"job {job} has failed, and would be started again from its newest snapshot once there is room"
        return [what, _ONLY_A_PLAN]
    return [] if reply.plan is None else [*_plan(reply.plan, style), _ONLY_A_PLAN]


def _plan(plan: Plan, style: Style) -> list[str]:
    of_jobs = any(worker.job for worker in plan.workers)
    columns = (
        Column("PID", right=True, drop=1 if of_jobs else 0),
        Column("JOB" if of_jobs else "NAME", shrink=8),
        Column("FROM"),
        Column("TO"),
        Column("CARRIED", right=True),
        Column("STAYS", right=True),
        Column("CARRIER"),
    )
    rows: list[list[Cell]] = [
        [
            str(worker.pid),
            _job_name(worker) if of_jobs else worker.name,
            worker.gpu or UNKNOWN,
            worker.to or UNKNOWN,
            binary_size(worker.size_bytes),
            binary_size(max(worker.left_alone_bytes, worker.stays_bytes or 0)),
            worker.carrier,
        ]
        for worker in plan.workers
    ]
    lines = [*table(columns, rows, style), ""]
    for gpu, needed_bytes in sorted(plan.reservation_bytes.items()):
        free = plan.gpu_free_bytes.get(gpu)
        of_free = "unknown" if free is None else binary_size(free)
        lines.append(f"memory on {printable(gpu)}: {binary_size(needed_bytes)} needed, {of_free} free")
    if plan.pool_needed_bytes:
        ready = f", {binary_size(plan.pool_ready_bytes)} ready" if plan.pool_ready_bytes else ""
        needed = binary_size(plan.pool_needed_bytes)
        lines.append(f"pool: {needed} needed, {binary_size(plan.pool_free_bytes)} free{ready}")
    lines.append(_estimate(plan))
    if plan.is_distributed:
        lines.append("all ranks stop at the same boundary")
    lines += [line for hazard in plan.hazards for line in _paragraph(f"note: {hazard}", style)]
    lines += _paragraph(f"steps: {'; '.join(plan.steps)}", style)
    return lines


def _estimate(plan: Plan) -> str:
    """Return the estimated time, worded for what happens to the job."""
    of_image = "" if plan.image_s is None else f", {plan.image_s:.1f} s of it for the image"
    if plan.kind == "restore":
        return f"the job would train again after about {plan.estimate_s:.1f} s{of_image}"
    stands = f"the estimated downtime is {plan.estimate_s:.2f} s{of_image}"
    if plan.ends:
        stands = f"it would take about {plan.estimate_s:.1f} s{of_image}, until the job ends"
    return stands if plan.way == "agent" and plan.kind == "resume" else f"{stands}, after it reaches its next boundary"


def _paragraph(text: str, style: Style) -> list[str]:
    return wrapped(printable(text), style.paragraph_columns)


def drained_text(reply: Drained, style: Style) -> list[str]:
    """Return the result for each job, and a summary."""
    lines = [*_plans(reply, style), *_outcomes(reply, style)]
    if not (reply.plans or reply.operations or reply.left):
        return ["there is no process on it to move"]
    count = len(reply.plans)
    if count:
        return [*lines, f"{count} could be moved, {len(reply.left)} not", _ONLY_A_PLAN]
    moved, under_way, failed = _counts(reply)
    if not under_way and not failed and not reply.left:
        return [f"{moved} moved ({_which(reply)}): {', '.join(_routes_of(reply))}"]
    begun = f", {under_way} under way" if under_way else ""
    return [*lines, f"{moved} moved{begun}, {failed + len(reply.left)} not"]


def swapped_text(reply: Drained, style: Style) -> list[str]:
    if reply.plans:
        return [*_plans(reply, style), _ONLY_A_PLAN]
    moved, under_way, failed = _counts(reply)
    lines = _outcomes(reply, style)
    if moved and not under_way and not failed and not reply.left:
        who = job_names(process for each in reply.operations for process in each.processes)
        return [f"the jobs have changed places: {printable(', '.join(who))} ({_which(reply)})"]
    if under_way:
        return [*lines, "hegmd runs the other steps: watch them with hegmctl ops"]
    return [*lines, "the jobs have not changed places"]


def _plans(reply: Drained, style: Style) -> list[str]:
    several = len(reply.plans) > 1
    return [
        line
        for number, plan in enumerate(reply.plans, 1)
        for line in (*([f"{number}. {plan.kind}"] if several else []), *_plan(plan, style), "")
    ]


def _outcomes(reply: Drained, style: Style) -> list[str]:
    lines = [line for operation in reply.operations for line in outcome(operation, style)]
    return lines + [f"not moved: {printable(reason.message)}; {printable(reason.hint)}" for reason in reply.left]


def _which(reply: Drained) -> str:
    """Return the ids of the operations."""
    ids = [printable(operation.id) for operation in reply.operations]
    return f"operation {ids[0]}" if len(ids) == 1 else f"operations {', '.join(ids)}"


def _routes_of(reply: Drained) -> list[str]:
    return [
        f"{printable(', '.join(job_names(operation.processes)))} {_routes(operation)}" for operation in reply.operations
    ]


def _counts(reply: Drained) -> tuple[int, int, int]:
    """Return how many operations have reached their goal, are under way, and have failed."""
    failed = sum(operation.failure is not None for operation in reply.operations)
    over = sum(operation.failure is None and operation.phase in _OVER for operation in reply.operations)
    return over, len(reply.operations) - over - failed, failed


def cancelled_text(reply: OperationReply, style: Style) -> list[str]:
    operation = reply.operation
    if operation is None:
        return []
    return [f"operation {printable(operation.id)} is rolled back: {printable(_words(operation.phase))}"]


def given_up_text(reply: OperationReply, style: Style) -> list[str]:
    operation = reply.operation
    return [] if operation is None else [f"the state of operation {printable(operation.id)} is dropped"]


def operations_text(reply: OperationsReply, style: Style) -> list[str]:
    orphans = ["", *orphans_lines(reply.orphans, style)] if reply.orphans else []
    if not reply.operations:
        return ["There was no operation on this node.", *orphans]
    of_jobs = any(operation.job for operation in reply.operations)
    columns = (
        Column("ID", right=True),
        Column("KIND"),
        Column("PHASE"),
        *([Column("JOB", shrink=8)] if of_jobs else []),
        Column("PIDS", shrink=8, drop=5 if of_jobs else 0),
        Column("WHERE"),
        Column("SIZE", right=True, drop=1),
        Column("DOWNTIME", right=True, drop=2),
        Column("BEGAN", drop=3),
        Column("WHY", shrink=12, drop=4),
    )
    return [
        *table(columns, [_row(operation, of_jobs=of_jobs) for operation in reply.operations], style),
        *_waits(reply, style),
        *orphans,
    ]


def _waits(reply: OperationsReply, style: Style) -> list[str]:
    """Return what operations wait for, each command on its own line for copying."""
    lines: list[str] = []
    for operation in reply.operations:
        if operation.waits is not None:
            lines += [f"  {line}" for line in _paragraph(f"operation {operation.id}: {operation.waits.why}", style)]
            lines.append(f"    next: {printable(operation.waits.next)}")
    return ["", style.paint("Waiting:", "yellow"), *lines] if lines else []


def _row(operation: Operation, *, of_jobs: bool) -> list[Cell]:
    return [
        operation.id,
        f"{operation.kind} by restart" if operation.way == "restart" else operation.kind,
        (
            _words(operation.phase) if operation.doing is None else f"{_words(operation.phase)}: {operation.doing}",
            _COLOURS.get(operation.phase, "cyan"),
        ),
        *([_job(operation)] if of_jobs else []),
        ",".join(str(process.pid) for process in operation.processes),
        _routes(operation),
        binary_size(operation.size_bytes),
        UNKNOWN if operation.downtime_s is None else f"{operation.downtime_s:.3f} s",
        strftime("%Y-%m-%d %H:%M:%S", localtime(operation.created_utc)),
        UNKNOWN if operation.failure is None else operation.failure.message,
    ]


def _job(operation: Operation) -> str:
    if any(process.job for process in operation.processes):
        return ", ".join(job_names(operation.processes))
    return operation.job or UNKNOWN  # a daemon of an earlier release gives the id only


def _process(operation: Operation, process: OperationProcess) -> str:
    rank = "" if process.rank is None else f" (rank {process.rank})"
    state = _STATES.get(process.state, process.state)
    return printable(
        f"{process.pid}{rank}: {_route(operation, process)}, {binary_size(process.size_bytes)}; it {state}"
    )


def story_text(reply: StoryReply, style: Style) -> list[str]:
    operation = reply.operation
    lines = outcome(operation, style)
    if len(operation.processes) > 1:
        lines += [f"  {_process(operation, process)}" for process in operation.processes]
    lines.append("")
    if reply.untold:
        lines.append(f"({reply.untold} earlier lines are no longer remembered)")
    began_utc = reply.story[0].utc if reply.story else 0.0
    for line in reply.story:
        then = f" -> {', '.join(line.effects)}" if line.effects else ""
        detail = f" ({line.detail})" if line.detail else ""
        what = f"{line.event or 'planned'}{detail}{then}"
        lines.append(printable(f"{line.utc - began_utc:9.3f} s  {_words(line.phase):<13} {what}"))
    return lines


def orphans_text(reply: OrphansReply, style: Style) -> list[str]:
    if not reply.orphans:
        return ["There are no orphans."]
    return orphans_lines(reply.orphans, style)


def orphans_lines(orphans: tuple[Orphan, ...], style: Style) -> list[str]:
    """Return a paragraph for each orphan, its command on its own line for copying."""
    lines = [style.paint("Needs your attention:", "yellow")]
    for orphan in orphans:
        size = UNKNOWN if orphan.size_bytes is None else binary_size(orphan.size_bytes)
        text = printable(f"{orphan.kind} {orphan.name}: {size}, {orphan.where}; {orphan.why}")
        lines += [f"  {line}" for line in wrapped(text, style.paragraph_columns)]
        lines.append(f"    next: {printable(orphan.next)}")
    return lines


def dropped_text(reply: Dropped, style: Style) -> list[str]:
    size = "" if reply.size_bytes is None else f", {binary_size(reply.size_bytes)}"
    return [f"dropped: {printable(reply.name)}{size}"]
