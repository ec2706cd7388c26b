"""What the example shows: loading, the rounds as they happen, and the table at the end.

On a terminal the text of a round is coloured; anywhere else the same is plain lines without control
codes. All drawing happens between rounds, outside the time that the engine measures.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager

from rich.box import ASCII, SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from engine.decode import RoundRecord

PLAIN_WIDTH = 120
STYLES = {"accepted": "green", "corrected": "yellow", "dropped": "red strike"}
MARKS = {"accepted": ("", ""), "corrected": ("<", ">"), "dropped": ("[-", "-]")}
Segment = tuple[str, list[int]]  # kind, token ids
Decode = Callable[[Sequence[int]], str]


def segments_of(record: RoundRecord, request: int) -> list[Segment]:
    """One request's round as (kind, ids): accepted drafts, the target model's own token, and the
    drafts it dropped. A kind with no tokens is left out."""
    committed = record.committed[request]
    if not committed:
        return []
    accepted = record.num_accepted[request]
    parts = [
        ("accepted", committed[:accepted]),
        ("dropped", record.drafts[request][accepted:]),
        ("corrected", committed[accepted:]),
    ]
    return [(kind, ids) for kind, ids in parts if ids]


class Ui:
    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self.fancy = self.console.is_terminal
        if not self.fancy:
            self.console = Console(file=self.console.file, width=PLAIN_WIDTH, color_system=None)

    def line(self, text: str = "", style: str = "") -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        self.line()
        self.line(text if self.fancy else f"== {text}", style="bold")

    def legend(self) -> None:
        text = Text()
        for kind, meaning in (
            ("accepted", "accepted draft"),
            ("corrected", "the target model's own token"),
            ("dropped", "dropped draft"),
        ):
            text.append(self._marked(kind, meaning)).append("   ")
        self.console.print(text, soft_wrap=True)

    @contextmanager
    def progress(self, title: str, lines: bool = True):
        """Yields advance(done, total). Off a terminal: one line per quarter, or nothing.

        The bar is drawn by advance() alone, never by a thread that would compete with decoding.
        """
        if not self.fancy:
            yield _QuarterLines(self.line if lines else None, title)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
        )
        with Progress(
            *columns, TimeElapsedColumn(), console=self.console, auto_refresh=False, transient=True
        ) as bar:
            task = bar.add_task(title, total=None)
            bar.refresh()

            def advance(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)
                bar.refresh()

            yield advance

    def show_round(self, number: int, segments: Iterable[Segment], decode: Decode) -> None:
        """One request, round by round."""
        if self.fancy:
            self.console.print(self._joined(segments, decode), end="", soft_wrap=True)
            return
        parts = [f"{kind} {len(ids)} {_quoted(decode(ids))}" for kind, ids in segments]
        self.line(f"  round {number:3d}: " + " | ".join(parts))

    def show_transcript(self, name: str, segments: Iterable[Segment], decode: Decode) -> None:
        """One request of a batch, when the batch is done."""
        text = Text.assemble((f"{name}: ", "bold"), self._joined(segments, decode))
        self.console.print(text, soft_wrap=True)

    def table(self, columns: list[str], sections: list[list[list[str]]]) -> None:
        box = SIMPLE if self.fancy else ASCII
        table = Table(box=box, padding=0 if self.fancy else (0, 1))
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for rows in sections:
            for row in rows:
                table.add_row(*row)
            table.add_section()
        self.console.print(table)

    def _joined(self, segments: Iterable[Segment], decode: Decode) -> Text:
        text = Text()
        for kind, ids in segments:
            text.append(self._marked(kind, decode(ids)))
        return text

    def _marked(self, kind: str, words: str) -> Text:
        if self.fancy:
            return Text(words, style=STYLES[kind])
        before, after = MARKS[kind]
        return Text(before + words + after)


class _QuarterLines:
    def __init__(self, line: Callable[[str], None] | None, title: str):
        self._line, self._title, self._shown = line, title, 0

    def __call__(self, done: int, total: int) -> None:
        quarter = 4 * done // max(total, 1)
        if self._line is not None and quarter > self._shown:
            self._shown = quarter
            self._line(f"{self._title}: {25 * quarter}%")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') + '"'
