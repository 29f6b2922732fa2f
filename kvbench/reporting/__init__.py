"""Comparison reports: from stored runs to what people decide from. No torch."""

from kvbench.reporting.comparison import Compared, compare
from kvbench.reporting.report import write_report
from kvbench.reporting.view import Comparison, Policy

__all__ = ["Compared", "Comparison", "Policy", "compare", "write_report"]
