"""The report of a run: the verdict in words, a table for the terminal, one self-contained page."""

from __future__ import annotations

from sigmanens.lab.report.console import console_table
from sigmanens.lab.report.page import write_report
from sigmanens.lab.report.verdict import Verdict, verdict

__all__ = ["Verdict", "console_table", "verdict", "write_report"]
