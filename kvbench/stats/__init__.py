"""Paired statistics: pure functions, arrays in, named tuples out; no torch, no files.

A figure without a value is an `Undefined` with a reason, in the place of the value. Bad input raises `BadInputError`.
"""

from kvbench.stats.corrections import benjamini_hochberg, holm
from kvbench.stats.correlation import Correlation, fisher_interval, pearson, spearman
from kvbench.stats.decisions import Decision, Disposition, RequiredN, decide, required_n, required_n_proportions
from kvbench.stats.intervals import (
    MIN_CLUSTERS,
    MIN_ITEMS,
    RESAMPLES,
    Draws,
    Resampled,
    average_draws,
    difference_of_means,
    evaluate,
    interval_of,
    paired_bootstrap,
    refusal,
    resample,
)
from kvbench.stats.paired import (
    McNemar,
    PairedProportions,
    PairedValues,
    bounded_difference_interval,
    mcnemar,
    paired_proportions,
    paired_values,
    tango_interval,
)
from kvbench.stats.retention import (
    MIN_DIFFERING,
    AverageRetention,
    PerplexityRatio,
    Retention,
    TaskScores,
    average_retention,
    mean_of_intervals,
    paired_retention,
    perplexity_ratio,
)
from kvbench.stats.status import Interval, JSONValue, MaybeInterval, Undefined, Value, as_json

__all__ = [
    "MIN_CLUSTERS",
    "MIN_DIFFERING",
    "MIN_ITEMS",
    "RESAMPLES",
    "AverageRetention",
    "Correlation",
    "Decision",
    "Disposition",
    "Draws",
    "Interval",
    "JSONValue",
    "MaybeInterval",
    "McNemar",
    "PairedProportions",
    "PairedValues",
    "PerplexityRatio",
    "RequiredN",
    "Resampled",
    "Retention",
    "TaskScores",
    "Undefined",
    "Value",
    "as_json",
    "average_draws",
    "average_retention",
    "benjamini_hochberg",
    "bounded_difference_interval",
    "decide",
    "difference_of_means",
    "evaluate",
    "fisher_interval",
    "holm",
    "interval_of",
    "mcnemar",
    "mean_of_intervals",
    "paired_bootstrap",
    "paired_proportions",
    "paired_retention",
    "paired_values",
    "pearson",
    "perplexity_ratio",
    "refusal",
    "required_n",
    "required_n_proportions",
    "resample",
    "spearman",
    "tango_interval",
]
