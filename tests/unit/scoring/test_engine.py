"""Scores and generations of arms against plain forward passes, one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import BadInputError
from kvbench.kv.capture import to_content
from kvbench.scoring.arms import Arm, mapper_arm, own_prefill
from kvbench.scoring.engine import TransferEngine
from kvbench.scoring.generation import GenerationSettings
from kvbench.scoring.scorer import SharedScorer

HEADER = tuple(int(i) for i in torch.randint(3, 200, (150,), generator=torch.Generator().manual_seed(5)))
REQUESTS = [
    ((5, 9, 13, 17), (21,)),
    ((5, 9, 13, 17), (22, 4, 6)),
    ((2, 4, 8), (3, 3)),
    ((7,), (11, 12)),
    *[((*HEADER, 30 + i), (40 + i, 41)) for i in range(6)],
]


def slow_score(model, context, continuation):
    """Sum of log-probabilities from one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model.model(input_ids=torch.tensor([context + continuation])).logits[0].log_softmax(-1)
    rows = logits[len(context) - 1 : -1]
    return float(sum(r[t] for r, t in zip(rows, continuation, strict=True))), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def _scorer(source, target, arms, batch_size=3, **engine):
    return SharedScorer(TransferEngine(source, target, arms, **engine), batch_size=batch_size, max_length=512)


@pytest.mark.parametrize("batch_size", [1, 4, "auto"])
@pytest.mark.parametrize("hold_back", [1, 2, 5])
@pytest.mark.parametrize("share", [True, False])
def test_own_prefill_equals_a_plain_forward_pass(tiny, batch_size, hold_back, share):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    arms = [own_prefill("target", target), own_prefill("source", source), mapper_arm("oracle", source, target)]
    scorer = _scorer(source, target, arms, batch_size, hold_back=hold_back, share_headers=share)
    for arm, model in (("target", target), ("source", source), ("oracle", target)):
        for (context, continuation), score in zip(REQUESTS, scorer.loglikelihoods(arm, REQUESTS), strict=True):
            logprob, greedy = slow_score(model, context, continuation)
            assert score.logprob == pytest.approx(logprob, abs=1e-4)
            assert score.greedy == greedy


def test_shared_headers_are_prefilled_once(tiny):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    costs = {}
    for share in (True, False):
        scorer = _scorer(source, target, [own_prefill("target", target), mapper_arm("raw", source, target)], share_headers=share)
        scorer.loglikelihoods("raw", REQUESTS)
        costs[share] = scorer.engine.costs
    # six contexts of 151 tokens, one held back: a header of 150 and nothing behind it
    assert costs[False].prefilled["source"] - costs[True].prefilled["source"] == 5 * 150 == costs[True].saved["source"]
    assert costs[False].saved["source"] == 0


def test_contexts_are_prefilled_once_for_all_continuations_and_arms(tiny):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    arms = [own_prefill("target", target), *[mapper_arm(n, source, target) for n in ("zero", "raw", "random")]]
    scorer = _scorer(source, target, arms)
    for arm in arms:
        scorer.loglikelihoods(arm.name, [((5, 9, 13, 17), (i,)) for i in range(20, 25)])
    assert scorer.engine.costs.prefilled == {"source": 3, "target": 3}


def test_too_short_and_truncated_contexts_are_counted(tiny):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    scorer = SharedScorer(TransferEngine(source, target, [mapper_arm("zero", source, target)]), batch_size=2, max_length=4)
    requests = [((7,), (11,)), ((1, 2, 3, 4, 5, 6), (9, 8))]
    scores = scorer.loglikelihoods("zero", requests)
    costs = scorer.engine.costs
    assert (costs.contexts, costs.too_short, costs.truncated) == (2, 1, 1)
    # nothing can be transferred of a one-token context: the target answers all of it, and the count above says so
    assert scores[0].logprob == pytest.approx(slow_score(target, (7,), (11,))[0], abs=1e-4)


def test_zeroed_cache_equals_attention_to_zero_keys_and_values(tiny):
    """An independent definition: hooks that zero the projections of all prefix positions in a plain pass (zero keys stay zero under RoPE)."""
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    context, continuation = (5, 9, 13, 17, 30), (21, 22)

    def blank(_module, _inputs, output):
        output = output.clone()
        output[:, : len(context) - 1] = 0
        return output

    handles = [m.register_forward_hook(blank) for b in target.blocks for m in (b.self_attn.k_proj, b.self_attn.v_proj)]
    try:
        wanted = slow_score(target, context, continuation)[0]
    finally:
        for handle in handles:
            handle.remove()
    found = _scorer(source, target, [mapper_arm("zero", source, target)]).loglikelihoods("zero", [(context, continuation)])[0]
    assert found.logprob == pytest.approx(wanted, abs=1e-4)


def test_raw_between_different_bases_equals_a_hand_made_cache(tiny):
    """Source content by relative depth, rotated with the target's base, in a cache that transformers itself builds."""
    from transformers.cache_utils import DynamicCache

    source = tiny(layers=2, seed=1)
    target = tiny(layers=3, seed=2, rope={"rope_type": "default", "rope_theta": 500.0})
    context, continuation = (5, 9, 13, 17, 30), (21, 22)
    kv = source.prefill([context[:-1]])
    content = to_content(kv, source.rope)
    cos, sin = target.rope.cos_sin(content.positions)
    pairs = [(target.rope.apply(content.keys[s], cos, sin).transpose(1, 2), kv.values[s]) for s in (0, 0, 1)]
    cache = DynamicCache(ddp_cache_data=[(k.contiguous(), v.contiguous()) for k, v in pairs])
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([[30, 21]]), cache=cache).logits[0].log_softmax(-1)
    found = _scorer(source, target, [mapper_arm("raw", source, target)]).loglikelihoods("raw", [(context, continuation)])[0]
    assert found.logprob == pytest.approx(float(logits[0, 21] + logits[1, 22]), abs=1e-4)


def test_shuffled_is_the_targets_own_cache_of_another_prompt(tiny):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    requests = [((5, 9, 13, 17), (21,)), ((2, 4, 8, 16), (3,))]
    found = _scorer(source, target, [mapper_arm("shuffled", source, target)]).loglikelihoods("shuffled", requests)
    assert found[0].logprob == pytest.approx(slow_score(target, (2, 4, 8, 17), (21,))[0], abs=1e-4)
    assert found[1].logprob == pytest.approx(slow_score(target, (5, 9, 13, 16), (3,))[0], abs=1e-4)


@pytest.mark.parametrize("name", ["zero", "raw", "random", "shuffled"])
def test_controls_differ_from_the_target(tiny, name):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    found = _scorer(source, target, [mapper_arm(name, source, target)]).loglikelihoods(name, REQUESTS[:3])
    wanted = [slow_score(target, c, t)[0] for c, t in REQUESTS[:3]]
    assert max(abs(f.logprob - w) for f, w in zip(found, wanted, strict=True)) > 0.05


def test_identity_on_a_self_pair_equals_the_model(tiny):
    model = tiny(layers=3, seed=2)
    found = _scorer(model, model, [mapper_arm("identity", model, model)]).loglikelihoods("identity", REQUESTS)
    for (context, continuation), score in zip(REQUESTS, found, strict=True):
        assert score.logprob == pytest.approx(slow_score(model, context, continuation)[0], abs=1e-4)


def test_identity_between_unequal_depths_is_refused(tiny):
    with pytest.raises(BadInputError, match=r"2 layers.*3"):
        mapper_arm("identity", tiny(layers=2), tiny(layers=3))


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("hold_back", [1, 3])
def test_greedy_generation_equals_a_loop_without_cache(tiny, batch_size, hold_back):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    scorer = _scorer(source, target, [own_prefill("target", target), mapper_arm("zero", source, target)], batch_size, hold_back=hold_back)
    settings = GenerationSettings(max_new_tokens=80, stop=())
    contexts = [c for c, _ in REQUESTS[1:]]
    ends = {target.tokenizer.eos_token_id}
    for context, found in zip(contexts, scorer.generations("target", [(c, settings) for c in contexts]), strict=True):
        wanted = []
        with torch.no_grad():
            while len(wanted) < 80:
                token = int(target.model(input_ids=torch.tensor([list(context) + wanted])).logits[0, -1].argmax())
                if token in ends:
                    break
                wanted.append(token)
        assert found == wanted


def test_stop_strings_end_a_generation(tiny):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    scorer = _scorer(source, target, [own_prefill("target", target)])
    free = scorer.generations("target", [((5, 9, 13), GenerationSettings(12, ()))])[0]
    text = target.tokenizer.decode(free)
    stop = target.tokenizer.decode(free[4:6]).strip()
    assert stop in text
    stopped = scorer.generations("target", [((5, 9, 13), GenerationSettings(12, (stop,)))])[0]
    assert free[: len(stopped)] == stopped
    assert len(stopped) <= 6
    assert stop in target.tokenizer.decode(stopped)


def test_sampling_is_seeded_and_paired_across_arms(tiny):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    settings = GenerationSettings(10, (), do_sample=True, temperature=0.7, top_k=50)
    arms = [own_prefill("target", target), mapper_arm("oracle", source, target)]
    one, two = (_scorer(source, target, arms) for _ in range(2))
    first = one.generations("target", [((5, 9, 13), settings)])
    assert first == two.generations("target", [((5, 9, 13), settings)]) == one.generations("oracle", [((5, 9, 13), settings)])


@pytest.mark.parametrize("bad", [{"num_beams": 4}, {"penalty_alpha": 0.6}])
def test_generation_arguments_that_do_not_exist_here_are_refused(bad):
    with pytest.raises(BadInputError, match=next(iter(bad))):
        GenerationSettings.from_kwargs(bad, 8, [])


def test_arms_need_their_models_and_names_of_their_own(tiny):
    target = tiny(layers=3, seed=2)
    with pytest.raises(BadInputError, match="need the source"):
        TransferEngine(None, target, [own_prefill("source", target)])
    with pytest.raises(BadInputError, match="share a name"):
        TransferEngine(None, target, [own_prefill("target", target)] * 2)
    with pytest.raises(BadInputError, match="hold_back = 0"):
        TransferEngine(None, target, [own_prefill("target", target)], hold_back=0)


def test_eager_and_sdpa_agree(tiny):
    scores = []
    for attention in ("sdpa", "eager"):
        source, target = tiny(layers=2, seed=1, attention=attention), tiny(layers=3, seed=2, attention=attention)
        scores.append(_scorer(source, target, [mapper_arm("raw", source, target)]).loglikelihoods("raw", REQUESTS))
    for a, b in zip(*scores, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_headers_are_evicted_when_they_take_too_much(tiny, monkeypatch):
    monkeypatch.setattr("kvbench.scoring.engine.HEADER_BYTES", 1)
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    arms: list[Arm] = [own_prefill("target", target), mapper_arm("oracle", source, target)]
    scorer = _scorer(source, target, arms)
    found = scorer.loglikelihoods("oracle", REQUESTS)
    assert len(scorer.engine._headers) == 1
    for (context, continuation), score in zip(REQUESTS, found, strict=True):
        assert score.logprob == pytest.approx(slow_score(target, context, continuation)[0], abs=1e-4)


def test_rows_that_end_early_leave_the_batch_and_the_others_go_on_alike(tiny, monkeypatch):
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    contexts = [(5, 9, 13, i) for i in range(20, 28)]
    settings = GenerationSettings(16, ())
    free = _scorer(source, target, [own_prefill("target", target)], 8).generations("target", [(c, settings) for c in contexts])
    sizes = []
    run = type(target).run

    def watched(self, cache, query, *rest):
        sizes.append(query.ids.shape[0])
        return run(self, cache, query, *rest)

    monkeypatch.setattr(type(target), "run", watched)
    stops = tuple(dict.fromkeys(target.tokenizer.decode([tokens[2]]).strip() for tokens in free[:6] if len(tokens) > 2))
    stopped = _scorer(source, target, [own_prefill("target", target)], 8).generations(
        "target", [(c, GenerationSettings(16, stops)) for c in contexts]
    )
    assert min(sizes) < 8
    for a, b in zip(stopped, free, strict=True):
        assert b[: len(a)] == a


def test_sampling_is_the_same_whether_or_not_other_rows_end_early(tiny):
    """Each row draws from a generator of its own; one that ended must not advance another's."""
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    contexts = [(5, 9, 13, i) for i in range(20, 26)]
    free = GenerationSettings(12, (), do_sample=True, temperature=1.0)
    whole = _scorer(source, target, [own_prefill("target", target)], 6).generations("target", [(c, free) for c in contexts])
    stops = tuple(dict.fromkeys(target.tokenizer.decode([tokens[1]]).strip() for tokens in whole[:4] if len(tokens) > 1))
    short = GenerationSettings(12, stops, do_sample=True, temperature=1.0)
    stopped = _scorer(source, target, [own_prefill("target", target)], 6).generations("target", [(c, short) for c in contexts])
    for a, b in zip(stopped, whole, strict=True):
        assert b[: len(a)] == a
