"""What evaluating many arms does once, and what lm-eval still finds."""

from __future__ import annotations

from torch.utils import collect_env

from kvbench.pairs.models import load_model
from kvbench.scoring import evaluate
from kvbench.scoring.arms import mapper_arm, own_prefill
from kvbench.scoring.engine import TransferEngine
from kvbench.scoring.scorer import SharedScorer


def test_the_machine_is_asked_about_once_for_all_arms(monkeypatch):
    """lm-eval runs `pip list` and other programs in every evaluation; with five arms that took longer than scoring a few hundred items."""
    asked = []
    monkeypatch.setattr(collect_env, "get_pretty_env_info", lambda: asked.append(1) or "a machine")
    evaluate._environment.cache_clear()
    source, target = (load_model(f"embedded:{name}", dtype="float32") for name in ("source", "target"))
    arms = [own_prefill("target", target), own_prefill("source", source), mapper_arm("zero", source, target)]
    found = evaluate.evaluate_arms(SharedScorer(TransferEngine(source, target, arms), batch_size=8, max_length=512), ["tiny_choice"], limit=4)
    evaluate._environment.cache_clear()
    assert len(asked) == 1
    assert [found[arm.name]["pretty_env_info"] for arm in arms] == ["a machine"] * 3
    assert all(found[arm.name]["lm_eval_version"] for arm in arms)
    # lm-eval's own functions are back in their place.
    from lm_eval import evaluator
    from lm_eval.loggers.utils import add_env_info

    assert evaluator.add_env_info is add_env_info
