"""How numbers are written: the same in HTML, Markdown and sentences."""

from __future__ import annotations

from kvbench.reporting.view import Estimate, PairView, Policy, TaskView

MINUS = "\u2212"


def signed(text: str) -> str:
    """A proper minus sign, and a plus where there is none."""
    return text.replace("-", MINUS)


def percent(value: float, digits: int = 1) -> str:
    """0.123 -> '12.3 %'."""
    return signed(f"{100 * value:.{digits}f} %")


def points(value: float, digits: int = 1) -> str:
    """A difference of fractions in percentage points: 0.012 -> '+1.2 pp'."""
    shown = f"{100 * value:+.{digits}f}"
    return signed("0.0" if float(shown) == 0 else shown) + " pp"


def margin(policy: Policy) -> str:
    """What a task may lose, in words."""
    if policy.retention is None:
        kept = f"margin {points(policy.margin).lstrip('+')} of score"
    else:
        further = [] if policy.average_retention is None else [f"{percent(policy.average_retention, 0)} on average"]
        # Floors of their own: the canary's.
        further += [f"{percent(floor, 0)} of a canary's" for floor in sorted(set(policy.floors.values()) - {policy.retention})]
        kept = f"at least {percent(policy.retention, 0)} of the target's score kept" + (f" ({', '.join(further)})" if further else "")
    name = "" if policy.name is None else f"policy '{policy.name}'" + (f" {policy.fingerprint[:12]}" if policy.fingerprint else "") + ": "
    return f"{name}{kept}, {policy.nll_margin:g} nats per token"


def p_value(p: float | None) -> str:
    """A p-value as it is usually printed."""
    if p is None:
        return "\u2013"
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def score(task: TaskView, value: float | None) -> str:
    """A score in the unit of its task; perplexities as numbers."""
    if value is None:
        return "undefined"
    if task.kind == "nll":
        return f"{value:.2f}" if value < 1e4 else f"{value:.2e}"
    return percent(value) if task.fraction else signed(f"{value:.4g}")


def difference(task: TaskView, value: float | None) -> str:
    """A difference in the unit of its task."""
    if value is None:
        return "undefined"
    if task.kind == "nll":
        return signed(f"{value:+.4f}") + " nats"
    return points(value) if task.fraction else signed(f"{value:+.4g}")


def ratio(value: float | None, digits: int = 1) -> str:
    """A retention."""
    return "undefined" if value is None else percent(value, digits)


def score_interval(task: TaskView, estimate: Estimate) -> str:
    """Bounds in the unit of the task."""
    if estimate.lower is None or estimate.upper is None:
        return ""
    return f"{_bare(score(task, estimate.lower))} to {_bare(score(task, estimate.upper))}"


def difference_interval(task: TaskView, estimate: Estimate) -> str:
    """Bounds of a difference."""
    if estimate.lower is None or estimate.upper is None:
        return ""
    return f"{_bare(difference(task, estimate.lower))} to {_bare(difference(task, estimate.upper))}"


def ratio_interval(estimate: Estimate) -> str:
    """Bounds of a retention, without the unit."""
    if estimate.lower is None or estimate.upper is None:
        return ""
    return f"{_bare(percent(estimate.lower))} to {_bare(percent(estimate.upper))}"


def points_with_interval(estimate: Estimate, level: float) -> str:
    """'+1.2 pp (95 % CI 0.3 to 2.1)', or with the reason why there is no interval."""
    if estimate.value is None:
        return f"undefined ({estimate.reason})"
    if estimate.lower is None or estimate.upper is None:
        return f"{points(estimate.value)} (no interval: {estimate.interval_reason})"
    return f"{points(estimate.value)} ({level * 100:.4g} % CI {_bare(points(estimate.lower))} to {_bare(points(estimate.upper))})"


def ratio_with_interval(estimate: Estimate, level: float) -> str:
    """'97.1 % (95 % CI 95.0 to 99.0)', or with the reason."""
    if estimate.value is None:
        return f"undefined ({estimate.reason})"
    if estimate.lower is None or estimate.upper is None:
        return f"{percent(estimate.value)} (no interval: {estimate.interval_reason})"
    return f"{percent(estimate.value)} ({level * 100:.4g} % CI {ratio_interval(estimate)})"


def pair_difference(task: TaskView, pair: PairView, level: float) -> str:
    """A pair's difference with its interval, in words."""
    if pair.difference.value is None:
        return f"undefined ({pair.difference.reason})"
    bounds = difference_interval(task, pair.difference)
    return (
        f"{difference(task, pair.difference.value)} ({level * 100:.4g} % CI {bounds})"
        if bounds
        else f"{difference(task, pair.difference.value)} (no interval)"
    )


def _bare(text: str) -> str:
    return text.removesuffix(" %").removesuffix(" pp").removesuffix(" nats")
