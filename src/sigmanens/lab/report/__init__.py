"""The report of a run: a summary in words, a table for the terminal, one self-contained page."""

from __future__ import annotations

from sigmanens.lab.report.console import console_table, print_run
from sigmanens.lab.report.page import write_report
from sigmanens.lab.report.summary import Summary, summary

__all__ = ["Summary", "console_table", "print_run", "summary", "write_report"]
