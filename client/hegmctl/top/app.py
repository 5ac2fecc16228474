"""The screen of `hegmctl top`, by textual: keys, dialogues, and one widget that draws the whole picture.

One widget instead of one for each table: it draws the visible rows alone, which costs a hundredth of a table widget
with 200 rows. The feed is handed in; it works in threads, and its news come as messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from hegmctl.top.picture import JOBS, MIGRATE, OPERATIONS, RESUME, SUSPEND, JobRow, Listener, NodeView, Picture
from hegmd.errors import HegmError
from hegmd.protocol.snapshots import Event

HELP = """\
Up, Down, PgUp, PgDn   choose a job or an operation
Tab                    go to the operations, and back to the jobs
s                      suspend the job: frees its GPU
r                      resume the job
m                      migrate the job to another GPU
                       Each shows its plan first, and asks.
o                      order the jobs by another column
/                      show only jobs that have a word
t, Enter               the timeline of the operation, or of the job's newest
?                      this page
q                      quit; operations continue

The small bars beside a GPU are its utilisation and its memory over the last minutes."""


class Source(Protocol):
    """The interface of a feed that the screen uses."""

    def start(self, listener: Listener) -> None: ...
    def stop(self) -> None: ...
    def plan(self, action: str, job: str, to: str | None, columns: int) -> list[str]: ...
    def carry_out(self, action: str, job: str, to: str | None, tell: Callable[[str], object]) -> str: ...
    def timeline(self, op_id: str, columns: int, ellipsis: str) -> list[str]: ...


class ViewArrived(Message):
    def __init__(self, view: NodeView) -> None:
        super().__init__()
        self.view = view


class NodeEventArrived(Message):
    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class DaemonLost(Message):
    """The daemon does not answer."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


class NoticeArrived(Message):
    """A command came on, or ended."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class ReplyArrived(Message):
    """A plan or a timeline came in, for the screen that shows it."""

    def __init__(self, title: str, lines: list[str], command: tuple[str, str, str | None] | None) -> None:
        super().__init__()
        self.title = title
        self.lines = lines
        self.command = command


class FeedCallbacks(Listener):
    """Turns callbacks of the feed's threads into messages, which textual accepts from any thread."""

    def __init__(self, app: App[None]) -> None:
        self._app = app

    def on_view(self, view: NodeView) -> None:
        self._app.post_message(ViewArrived(view))

    def happened(self, event: Event) -> None:
        self._app.post_message(NodeEventArrived(event))

    def away(self, why: str) -> None:
        self._app.post_message(DaemonLost(why))


class Page(ModalScreen[bool]):
    """Text to read, and a question about it if there is one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,n", "no", show=False),
        Binding("y", "yes", show=False),
        Binding("enter", "enter", show=False),
    ]
    CSS = """
    Page { align: center middle; }
    Page Vertical { width: 96%; height: auto; max-height: 96%; border: ascii $foreground; padding: 0 1; }
    Page VerticalScroll { height: auto; max-height: 18; }
    """

    def __init__(self, title: str, lines: Sequence[str], question: str = "") -> None:
        super().__init__()
        self.lines = tuple(lines)
        self._title, self._question = title, question

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Content.styled(self._title, "bold"))
            with VerticalScroll():
                yield Static(Content("\n".join(self.lines)), id="text")
            yield Static(Content.styled(self._question or "Esc closes this", "bold"))

    def action_no(self) -> None:
        self.dismiss(False)

    def action_yes(self) -> None:
        self.dismiss(bool(self._question))

    def action_enter(self) -> None:
        if not self._question:  # a question needs a y, so that Enter does not confirm it by mistake
            self.dismiss(False)


class LineInput(ModalScreen[str | None]):
    """A line to type."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]
    CSS = """
    Question { align: center bottom; }
    Question Vertical { width: 100%; height: 2; }
    Question Input { border: none; height: 1; padding: 0; }
    """

    def __init__(self, question: str, value: str = "") -> None:
        super().__init__()
        self._question, self._value = question, value

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Content.styled(self._question, "bold"))
            yield Input(self._value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())

    def action_leave(self) -> None:
        self.dismiss(None)


class Board(Static):
    """The picture, drawn in the size that the terminal has."""

    def __init__(self, picture: Picture) -> None:
        super().__init__()
        self._picture = picture

    def draw(self) -> None:
        if not self.size.width:
            return
        parts: list[tuple[str, str]] = []
        for number, line in enumerate(self._picture.lines(self.size.width, self.size.height)):
            parts += [("\n" if number else "", ""), *line]
        text = Content.assemble(*(part for part in parts if part[0]))
        self.update(text, layout=False)

    def on_resize(self) -> None:
        self.draw()


class TopApp(App[None]):
    """The live view of one node."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; }
    Board { width: 100%; height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "switch", show=False, priority=True),  # or it would move textual's focus
        *(
            Binding(key, action, show=False)
            for key, action in (
                ("up,k", "move(-1)"),
                ("down,j", "move(1)"),
                ("pageup", "move(-10)"),
                ("pagedown", "move(10)"),
                ("s", f"ask('{SUSPEND}')"),
                ("r", f"ask('{RESUME}')"),
                ("m", "migrate"),
                ("o", "order"),
                ("slash", "filter"),
                ("t,enter", "timeline"),
                ("question_mark,h,f1", "help"),
                ("q,ctrl+c", "quit"),
            )
        ),
    ]

    def __init__(self, source: Source, picture: Picture) -> None:
        super().__init__(ansi_color=True)
        self._source = source
        self._picture = picture
        self._board = Board(picture)

    def compose(self) -> ComposeResult:
        yield self._board

    def on_mount(self) -> None:
        self._source.start(FeedCallbacks(self))

    def on_unmount(self) -> None:
        self._source.stop()

    # -- what comes in -------------------------------------------------------------------------------------------------

    def on_view_arrived(self, message: ViewArrived) -> None:
        self._picture.take(message.view)
        self._board.draw()

    def on_node_event_arrived(self, message: NodeEventArrived) -> None:
        self._picture.happened(message.event)
        self._board.draw()

    def on_daemon_lost(self, message: DaemonLost) -> None:
        self._picture.trouble = message.why
        self._board.draw()

    def on_notice_arrived(self, message: NoticeArrived) -> None:
        self._picture.notice = message.text
        self._board.draw()

    def on_reply_arrived(self, message: ReplyArrived) -> None:
        self._note("")
        if message.command is None:
            self.push_screen(Page(message.title, message.lines))
            return
        action, job, to = message.command

        def answered(yes: bool | None) -> None:
            if yes:
                self._in_thread(lambda: self._carry_out(action, job, to))

        self.push_screen(Page(message.title, message.lines, "Do it? y: yes, Esc: no"), answered)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        self._picture.move(by)
        self._note("")

    def action_switch(self) -> None:
        if len(self.screen_stack) > 1:
            return
        self._picture.switch()
        self._note("")

    def action_order(self) -> None:
        self._picture.next_order()
        self._note("")

    def action_filter(self) -> None:
        def typed(text: str | None) -> None:
            if text is not None:
                self._picture.filter = text
                self._note("")

        self.push_screen(LineInput("Show jobs with this word (empty for all):", self._picture.filter), typed)

    def action_help(self) -> None:
        self.push_screen(Page("hegmctl top", HELP.splitlines()))

    def action_timeline(self) -> None:
        operation = self._picture.operation()
        if operation is None:
            what = "no operation of this job is known" if self._picture.section == JOBS else "there is no operation"
            self._note(what)
            return
        op_id, columns = operation.id, max(40, self.size.width - 12)
        ellipsis = "…" if self._picture.unicode else "~"
        title = f"operation {op_id}"
        self._in_thread(lambda: ReplyArrived(title, self._source.timeline(op_id, columns, ellipsis), None))

    def action_migrate(self) -> None:
        job = self._job()
        if job is None:
            return

        def typed(to: str | None) -> None:
            if to:
                self._plan(MIGRATE, job, to)

        question = f"Migrate {job.name} from {', '.join(job.gpus) or 'no GPU'} to which GPU?"
        self.push_screen(LineInput(question, self._picture.target_for(job)), typed)

    def action_ask(self, action: str) -> None:
        job = self._job()
        if job is not None:
            self._plan(action, job, None)

    # -- commands ------------------------------------------------------------------------------------------------------

    def _job(self) -> JobRow | None:
        job = self._picture.job() if self._picture.section != OPERATIONS else None
        if job is None:
            self._note("choose a job first; Tab goes back to the jobs")
        return job

    def _plan(self, action: str, job: JobRow, to: str | None) -> None:
        title = f"{action} {job.name} ({job.id})" + (f" to {to}" if to else "")
        self._note(f"planning: {title}")
        columns = max(40, self.size.width - 12)
        self._in_thread(
            lambda: ReplyArrived(title, self._source.plan(action, job.id, to, columns), (action, job.id, to))
        )

    def _carry_out(self, action: str, job: str, to: str | None) -> Message:
        return NoticeArrived(
            self._source.carry_out(action, job, to, lambda text: self.post_message(NoticeArrived(text)))
        )

    def _in_thread(self, work: Callable[[], Message]) -> None:
        """Run it in a thread; post its result, and show an error."""

        def run() -> None:
            try:
                message = work()
            except HegmError as error:
                message = NoticeArrived(f"{error.message}; {error.hint}")
            self.post_message(message)

        threading.Thread(target=run, daemon=True, name="top: command").start()

    def _note(self, text: str) -> None:
        self._picture.notice = text
        self._board.draw()
