"""Multi-turn handoff: protocols against slow simulations without batching, and the arithmetic of drift."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvbench.errors import ArtifactError, BadInputError
from kvbench.mappers.controls import control
from kvbench.mappers.linear import LinearMapper, MemoryStore
from kvbench.runs.schema import ModelSpec
from kvbench.scoring.answers import answer_scores, exact_match, normalised, token_f1
from kvbench.scoring.conversations import Conversation, coqa_conversations, embedded_conversations, load_conversations, tokenise
from kvbench.scoring.drift import OWN_PREFILL, as_stored, slope_columns, slope_of_means, summarise
from kvbench.scoring.engine import Costs
from kvbench.scoring.handoff import HandoffSpec, HandoffStore, TurnAnswer, converse, run_handoff
from kvbench.scoring.handoff_protocols import PROTOCOLS, HandoffMapper, protocols
from kvbench.stats import Interval, Undefined

NEW = 6


# --- answers


@pytest.mark.parametrize(
    ("gold", "answer", "f1", "exact"),
    [
        # gold: grass clovers leaves and vines; answer: grass and clovers; P = 3/3, R = 3/5, F1 = 2 * 0.6 / 1.6
        ("Grass, clovers, leaves, and vines.", "the grass and clovers", 0.75, 0),
        ("No.", "no", 1, 1),
        ("an apple a day", "Apple Day!", 1, 1),
        # a word given twice counts once where gold has it once: P = 1/2, R = 1
        ("red", "red red", 2 / 3, 0),
        ("blue", "red", 0, 0),
        # SQuAD: where either side is empty, 1 only if both are
        ("the", "", 1, 1),
        ("blue", "", 0, 0),
    ],
)
def test_scores_of_worked_examples(gold, answer, f1, exact):
    assert token_f1(gold, answer) == pytest.approx(f1)
    assert exact_match(gold, answer) == exact


def test_normalisation_removes_case_punctuation_articles_and_blanks():
    assert normalised("  The Cat's  hat, an A-b. ") == "cats hat ab"


def test_several_golds_are_left_out_in_turn():
    # Leaving out "red": best of ("blue" 0, "dark red" 2/3) = 2/3; leaving out "blue": best of (1, 2/3) = 1; leaving out "dark red": 1.
    assert answer_scores(["red", "blue", "dark red"], "red").f1 == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert answer_scores(["red", "blue", "dark red"], "red").exact_match == pytest.approx(2 / 3)


# --- conversations


def test_embedded_conversations_go_on_from_their_gold_answers():
    talks = embedded_conversations(5)
    assert len({talk.turns for talk in talks}) > 1
    talk = talks[0]
    assert talk.questions[0].startswith("\nQuestion:")
    assert all(q.endswith("\nAnswer:") and q.count("Question:") == 1 for q in talk.questions)
    assert not talk.opening.endswith("\n")


def test_tokens_are_those_of_the_whole_text(tokenizer):
    for talk in embedded_conversations(5):
        script = tokenise(talk, tokenizer, limit=1024, answer_room=NEW, gold_history=True)
        text, ids = talk.opening, list(script.opening)
        for question, gold, asked, repeated in zip(talk.questions, talk.golds, script.questions, script.golds, strict=True):
            text, ids = text + question + f" {gold[0]}", ids + list(asked) + list(repeated)
        assert ids == tokenizer.encode(text)


def test_what_does_not_fit_is_cut_on_the_left_and_counted(tokenizer):
    talk = embedded_conversations(1)[0]
    full = tokenise(talk, tokenizer, limit=10_000, answer_room=NEW, gold_history=True)
    # Room for everything up to the last question and its answer, but for 5 tokens.
    whole = len(full.opening) + sum(map(len, full.questions)) + sum(map(len, full.golds[:-1])) + NEW
    cut = tokenise(talk, tokenizer, limit=whole - 5, answer_room=NEW, gold_history=True)
    assert (cut.cut, cut.dropped, cut.opening) == (5, 0, full.opening[5:])
    # One token of the story must stay: the last turn goes.
    short = tokenise(talk, tokenizer, limit=whole - len(full.opening), answer_room=NEW, gold_history=True)
    assert short.dropped == 1
    assert len(short.opening) >= 1
    with pytest.raises(BadInputError, match="first question of conversation 'turns-0' does not fit the position limit of 10"):
        tokenise(talk, tokenizer, limit=10, answer_room=NEW, gold_history=True)


def test_coqa_rows():
    row = {
        "id": "x",
        "story": " A story. ",
        "questions": {"input_text": ["Who?", "Why?"]},
        "answers": {"input_text": ["Tom", "Fun"]},
        "additional_answers": {"1": {"input_text": ["tom", "For fun"]}},
    }
    (talk,) = coqa_conversations([row])
    assert talk == Conversation("x", "A story.", ("\n\nQ: Who?\n\nA:", "\n\nQ: Why?\n\nA:"), (("Tom",), ("Fun", "For fun")))
    with pytest.raises(BadInputError, match="comes twice"):
        coqa_conversations([row, row])
    with pytest.raises(BadInputError, match="conversation 0 is not a row of EleutherAI/coqa"):
        coqa_conversations([{**row, "answers": {"input_text": ["Tom"]}}])


def test_loading_refuses_in_words(tmp_path):
    with pytest.raises(BadInputError, match="no CoQA rows"):
        load_conversations("coqa", tmp_path)
    (tmp_path / "coqa").mkdir()
    (tmp_path / "coqa" / "test.jsonl").write_text("{not json\n")
    with pytest.raises(BadInputError, match="cannot be read"):
        load_conversations("coqa", tmp_path)
    with pytest.raises(BadInputError, match="unknown conversations 'quac'"):
        load_conversations("quac", None)
    with pytest.raises(BadInputError, match="must be at least 1"):
        load_conversations("embedded:turns", None, count=0)


def test_chosen_conversations_are_nested_and_turns_are_cut():
    small, large = ({c.name for c in load_conversations("embedded:turns", None, count=n, seed=3)} for n in (5, 20))
    assert small < large
    assert {c.turns for c in load_conversations("embedded:turns", None, count=20, max_turns=2)} == {2}


# --- protocols


def spec_of(**changes):
    fields = {
        "source": ModelSpec(name="a"),
        "target": ModelSpec(name="b"),
        "mappers": (),
        "protocols": PROTOCOLS,
        "data": "embedded:turns",
        "data_fingerprint": "0",
        "conversations": 4,
        "history": "gold",
        "handoff_turn": 1,
        "hold_back": 1,
        "max_new_tokens": NEW,
        "max_length": 512,
        "batch_size": 4,
        "dtype": "float32",
        "device": "cpu",
        "attention": "sdpa",
    }
    return HandoffSpec(**{**fields, **changes})


def scripts_of(tokenizer, count=4):
    # Stories of other lengths and conversations of other numbers of turns.
    talks = embedded_conversations(12)
    chosen = sorted({talk.turns: talk for talk in talks}.values(), key=lambda talk: talk.name)
    chosen += [talk for talk in talks if talk not in chosen]
    return [tokenise(talk, tokenizer, limit=512, answer_room=NEW, gold_history=True) for talk in chosen[:count]]


def answers_of(scripts, source, target, mapper, *, names=PROTOCOLS, **changes):
    spec = spec_of(**changes)
    models = {"source": source, "target": target}
    arms = protocols(names, [mapper], models, Costs(), handoff_turn=spec.handoff_turn, shared_history=spec.history == "gold")
    return converse(scripts, arms, models, spec)


def texts(answers, protocol):
    return {(a.conversation, a.turn): a.text for a in answers if a.protocol == protocol}


def identity(model):
    made = control("identity", target_layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim)
    return HandoffMapper("identity", made, made)


@pytest.mark.parametrize("history", ["gold", "generated"])
@pytest.mark.parametrize(("kind", "hold_back", "handoff_turn"), [("llama", 1, 1), ("qwen3", 3, 2)])
def test_identity_on_a_self_pair_changes_no_answer(tiny, tokenizer, history, kind, hold_back, handoff_turn):
    model, scripts = tiny(kind=kind), scripts_of(tokenizer)
    assert len({script.turns for script in scripts}) > 1
    answers = answers_of(scripts, model, model, identity(model), history=history, hold_back=hold_back, handoff_turn=handoff_turn)
    alone = texts(answers, "target")
    assert len(set(alone.values())) > 5
    for protocol in ("source", *PROTOCOLS):
        assert texts(answers, protocol) == alone, protocol


def test_identity_with_sliding_windows(tiny, tokenizer):
    model = tiny(kind="qwen3", sliding_window=24, use_sliding_window=True, max_window_layers=1, layers=3)
    scripts = scripts_of(tokenizer, 3)
    answers = answers_of(scripts, model, model, identity(model))
    assert all(texts(answers, protocol) == texts(answers, "target") for protocol in PROTOCOLS)


def test_a_zeroed_cache_changes_answers(tiny, tokenizer):
    model, scripts = tiny(), scripts_of(tokenizer)
    zero = control("zero", target_layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim)
    answers = answers_of(scripts, model, model, HandoffMapper("zero", zero, zero), names=("per_turn",))
    assert texts(answers, "per_turn") != texts(answers, "target")


def test_batches_do_not_matter(tiny, tokenizer):
    source, target, scripts = tiny(layers=2, seed=1), tiny(layers=3), scripts_of(tokenizer)
    mapper = HandoffMapper("random", random_map(source, target, 5), random_map(target, source, 6))
    together = answers_of(scripts, source, target, mapper)
    apart = [answer for script in scripts for answer in answers_of([script], source, target, mapper)]
    assert together == apart


def random_map(source, target, seed):
    generator = torch.Generator().manual_seed(seed)
    width = source.kv_heads * source.head_dim
    tensors = {}
    for layer in range(target.layers):
        for kind in "kv":
            tensors[f"target.{layer}.{kind}.W"] = torch.randn(2 * width, target.kv_heads * target.head_dim, generator=generator) / width**0.5
            tensors[f"target.{layer}.{kind}.b"] = torch.randn(target.kv_heads * target.head_dim, generator=generator)
    layers = [(layer % source.layers, (layer + 1) % source.layers) for layer in range(target.layers)]
    return LinearMapper(layers, width, target.kv_heads, target.head_dim, MemoryStore(tensors))


# One conversation, one row, no padding: a plain transformers cache, RoPE by its formula, the whole mapped at every turn.


def turn_keys(keys, sign):
    """Rotate `[heads, tokens, 8]` by the default RoPE of theta 10,000, forth (1) or back (-1)."""
    tokens, width = keys.shape[1], keys.shape[2]
    angle = torch.arange(tokens)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    first, second = keys[..., : width // 2], keys[..., width // 2 :]
    cos, sin = angle.cos(), sign * angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def slow_map(mapper, cache, target_layers):
    """Layer by layer, head by head: `[(keys, values)]` of one model as those of another."""
    content = {"k": [turn_keys(k, -1) for k, _ in cache], "v": [v for _, v in cache]}
    out = []
    for layer in range(target_layers):
        pair = []
        for kind in "kv":
            design = torch.cat([content[kind][s].transpose(0, 1).flatten(1) for s in mapper.source_layers[layer]], dim=1)
            mapped = design @ mapper.store.get(f"target.{layer}.{kind}.W") + mapper.store.get(f"target.{layer}.{kind}.b")
            heads = mapped.reshape(len(design), mapper.kv_heads, -1).transpose(0, 1)
            pair.append(turn_keys(heads, 1) if kind == "k" else heads)
        out.append(tuple(pair))
    return out


@torch.no_grad()
def slow_run(model, cache, ids):
    """Run tokens behind a cache of `[(keys, values)]`; the logits of the last and the longer cache."""
    held = DynamicCache(ddp_cache_data=[(k[None], v[None]) for k, v in cache]) if cache else DynamicCache()
    out = model.model(input_ids=torch.tensor([ids]), cache=held, use_cache=True)
    return out.logits[0, -1], [(layer.keys[0], layer.values[0]) for layer in held.layers]


def slow_answer(model, cache, held):
    tokens = []
    feed = list(held)
    for _ in range(NEW):
        logits, cache = slow_run(model, cache, feed)
        token = int(logits.argmax())
        if token == model.tokenizer.eos_token_id:
            break
        tokens.append(token)
        if "\n" in model.tokenizer.decode(tokens):
            break
        feed = [token]
    return model.tokenizer.decode(tokens, skip_special_tokens=True).split("\n")[0].strip()


def slow_talk(protocol, script, models, there, back, handoff_turn):
    """Answers of one conversation with gold history."""
    source, target = models["source"], models["target"]
    tokens, answers, cache, holder = list(script.opening), [], None, "source"
    covered = 0
    for turn, question in enumerate(script.questions, start=1):
        asked_at = len(tokens)
        tokens += question
        cut = len(tokens) - 1
        if protocol == "per_turn" or (protocol == "once" and turn <= handoff_turn):
            own = slow_run(source, None, tokens[:cut])[1]
            sends = protocol == "per_turn" or turn == handoff_turn
            cache, holder = (slow_map(there, own, target.layers), "target") if sends else (own, "source")
        elif protocol == "alternate" and turn > 1:
            cache = slow_run(models[holder], cache, tokens[covered:asked_at])[1]
            receiver = "target" if holder == "source" else "source"
            cache = slow_map(there if holder == "source" else back, cache, models[receiver].layers)
            holder = receiver
            cache = slow_run(models[holder], cache, tokens[asked_at:cut])[1]
        else:
            cache = slow_run(models[holder], cache, tokens[covered:cut])[1]
        covered = cut
        answers.append(slow_answer(models[holder], cache, tokens[cut:]))
        tokens += script.golds[turn - 1]
    return answers


@pytest.mark.parametrize(("protocol", "handoff_turn"), [("per_turn", 1), ("once", 1), ("once", 3), ("alternate", 1)])
def test_protocols_against_a_slow_simulation(tiny, tokenizer, protocol, handoff_turn):
    source, target, scripts = tiny(layers=2, seed=1), tiny(layers=3), scripts_of(tokenizer, 3)
    there, back = random_map(source, target, 5), random_map(target, source, 6)
    models = {"source": source, "target": target}
    answers = answers_of(scripts, source, target, HandoffMapper("random", there, back), names=(protocol,), handoff_turn=handoff_turn)
    for script in scripts:
        found = [a.text for a in answers if a.conversation == script.conversation.name and a.protocol == protocol]
        assert found == slow_talk(protocol, script, models, there, back, handoff_turn)
    assert texts(answers, protocol) != texts(answers, "target")


def test_the_target_alone_against_no_cache_at_all(tiny, tokenizer):
    target, script = tiny(), scripts_of(tokenizer, 1)[0]
    answers = answers_of([script], target, target, identity(target), names=())
    tokens = list(script.opening)
    for turn, question in enumerate(script.questions, start=1):
        tokens += question
        generated = []
        while len(generated) < NEW and "\n" not in tokenizer.decode(generated):
            with torch.no_grad():
                token = int(target.model(input_ids=torch.tensor([tokens + generated]), use_cache=False).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            generated.append(token)
        (answer,) = [a for a in answers if a.protocol == "target" and a.turn == turn]
        assert answer.text == tokenizer.decode(generated, skip_special_tokens=True).split("\n")[0].strip()
        assert answer.context_tokens == len(tokens)
        tokens += script.golds[turn - 1]


def test_a_generated_history_repeats_the_arms_own_answers(tiny, tokenizer):
    source, target, script = tiny(layers=2, seed=1), tiny(), scripts_of(tokenizer, 1)[0]
    answers = answers_of([script], source, target, HandoffMapper("random", random_map(source, target, 5)), names=("per_turn",), history="generated")
    for protocol in ("target", "source", "per_turn"):
        own = [a for a in answers if a.protocol == protocol]
        text = script.conversation.opening
        for answer, question in zip(own, script.conversation.questions, strict=True):
            text += question
            assert answer.context_tokens == len(tokenizer.encode(text))
            text += f" {answer.text}" if answer.text else ""


def test_old_tokens_are_neither_run_nor_mapped_again(tiny, tokenizer):
    source, target, scripts = tiny(layers=2, seed=1), tiny(), scripts_of(tokenizer)
    costs, models = Costs(), {"source": source, "target": target}
    arms = protocols(("per_turn",), [HandoffMapper("m", random_map(source, target, 5))], models, costs, handoff_turn=1, shared_history=True)
    converse(scripts, arms, models, spec_of())
    # All tokens but the last held-back one and the last gold answer, once.
    wanted = sum(len(s.opening) + sum(map(len, s.questions)) + sum(map(len, s.golds[:-1])) - 1 for s in scripts)
    assert costs.prefilled == {"source": wanted, "target": wanted}
    assert costs.mapped == wanted


def test_alternate_needs_a_way_back(tiny):
    model = tiny()
    mapper = HandoffMapper("m", identity(model).there)
    with pytest.raises(BadInputError, match="needs a mapper from target to source for 'm'"):
        protocols(("alternate",), [mapper], {"source": model, "target": model}, Costs(), handoff_turn=1, shared_history=True)


# --- runs


def test_a_run_resumes_and_refuses_another_spec(tiny, tokenizer, tmp_path):
    model, scripts, spec = tiny(), scripts_of(tokenizer), spec_of(batch_size=2)
    models, started = {"source": model, "target": model}, []

    def start():
        started.append(1)
        return protocols(("once",), [identity(model)], models, Costs(), handoff_turn=1, shared_history=True)

    first = run_handoff(scripts, HandoffStore.start(tmp_path / "h", spec), spec, models, start)
    assert len(started) == 2
    (tmp_path / "h" / "answers" / "batch-00001.jsonl").unlink()
    assert run_handoff(scripts, HandoffStore.start(tmp_path / "h", spec), spec, models, start) == first
    assert len(started) == 3
    with pytest.raises(BadInputError, match=r"max_new_tokens = 6, but this command asks for 7"):
        HandoffStore.start(tmp_path / "h", spec_of(batch_size=2, max_new_tokens=7))
    (tmp_path / "h" / "answers" / "batch-00000.jsonl").write_text('{"conversation":')
    with pytest.raises(ArtifactError, match="batch-00000"):
        run_handoff(scripts, HandoffStore.start(tmp_path / "h", spec), spec, models, start)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(BadInputError, match="is not a kvbench handoff"):
        HandoffStore.start(tmp_path / "other", spec)
    with pytest.raises(BadInputError, match="shortest question has"):
        run_handoff(scripts, HandoffStore.start(tmp_path / "g", spec_of(hold_back=50)), spec_of(hold_back=50), models, start)


# --- drift


def made_up(conversations, seed=0, arm="m", protocol="once", trend=0.02):
    """Answers of a target and an arm whose loss grows by `trend` per turn; conversations of 3 to 8 turns."""
    rng = np.random.default_rng(seed)
    found = []
    for c in range(conversations):
        habit = rng.normal(0, 0.05)
        for turn in range(1, int(rng.integers(3, 9)) + 1):
            reference = float(rng.uniform(0.5, 0.9))
            loss = 0.05 + trend * turn + habit + float(rng.normal(0, 0.05))
            for name, f1 in ((("target", "target"), reference), ((protocol, arm), reference - loss)):
                answer = {"conversation": f"c{c}", "turn": turn, "protocol": name[0], "arm": name[1], "answered_by": "target"}
                found.append(TurnAnswer(**answer, golds=("x",), text="x", f1=f1, exact_match=0.0, context_tokens=9))
    return found


def losses(answers):
    reference = {(a.conversation, a.turn): a.f1 for a in answers if a.protocol == "target"}
    own = [a for a in answers if a.protocol != "target"]
    return [a.conversation for a in own], np.array([a.turn for a in own]), np.array([reference[a.conversation, a.turn] - a.f1 for a in own])


def test_drift_and_slope_against_numpy():
    answers = made_up(25)
    figures = summarise(answers, resamples=1000)
    _, turns, drift = losses(answers)
    arm = next(a for a in figures.arms if a.arm == "m")
    assert arm.drift == pytest.approx(drift.mean())
    assert arm.slope == pytest.approx(np.polyfit(turns, drift, 1)[0])
    own = [t for t in figures.turns if t.arm == "m"]
    assert [t.drift for t in own] == pytest.approx([drift[turns == t.turn].mean() for t in own])
    # The same line through the turns' means, each weighted by its number of conversations (polyfit squares its weights).
    weighted = np.polyfit([t.turn for t in own], [t.drift for t in own], 1, w=np.sqrt([t.n for t in own]))[0]
    assert arm.slope == pytest.approx(weighted)


def test_the_interval_resamples_whole_conversations():
    answers = made_up(25)
    names, turns, drift = losses(answers)
    members = [np.flatnonzero(np.array(names) == name) for name in dict.fromkeys(names)]
    rng = np.random.default_rng(1)
    slow = []
    for _ in range(2000):
        drawn = np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])
        slow.append(np.polyfit(turns[drawn], drift[drawn], 1)[0])
    arm = next(a for a in summarise(answers, resamples=4000).arms if a.arm == "m")
    assert isinstance(arm.slope_interval, Interval)
    assert "clusters" in arm.slope_interval.method
    # BCa widened by t against plain percentiles: alike to a quarter of the width.
    lower, upper = np.quantile(slow, [0.025, 0.975])
    assert arm.slope_interval.lower == pytest.approx(lower, abs=(upper - lower) / 4)
    assert arm.slope_interval.upper == pytest.approx(upper, abs=(upper - lower) / 4)


def test_intervals_are_refused_for_few_conversations_and_turns_flagged():
    figures = summarise(made_up(9), resamples=1000)
    arm = next(a for a in figures.arms if a.arm == "m")
    assert arm.slope_interval == Undefined("9 clusters; a cluster bootstrap interval needs at least 10")
    assert all(t.few for t in figures.turns)
    stored = as_stored(summarise(made_up(14), resamples=1000))
    by_n = {turn.n >= 10: turn.lower for turn in stored.turns if turn.arm == "m"}
    assert by_n[False] is None
    assert by_n[True] is not None


def test_one_turn_has_no_slope():
    figures = summarise([a for a in made_up(12) if a.turn == 1], resamples=1000)
    arm = next(a for a in figures.arms if a.arm == "m")
    assert isinstance(arm.slope, Undefined)
    assert as_stored(figures).slopes == ()
    assert np.isinf(slope_of_means(np.array([c.mean() for c in slope_columns(np.ones(3), np.arange(3.0))])))


def test_before_the_handoff_nothing_counts_as_transfer():
    figures = summarise(made_up(12), handoff_turn=3, resamples=1000)
    assert min(t.turn for t in figures.turns if t.arm == "m") == 3
    assert min(t.turn for t in figures.turns if t.arm == "target") == 1


def test_alternation_without_transfer_is_made_of_the_models_alone(tiny, tokenizer):
    source, target, scripts = tiny(layers=2, seed=1), tiny(), scripts_of(tokenizer)
    answers = answers_of(
        scripts, source, target, HandoffMapper("m", random_map(source, target, 5), random_map(target, source, 6)), names=("alternate",)
    )
    figures = summarise(answers, resamples=1000)
    for turn in (t for t in figures.turns if t.arm == OWN_PREFILL):
        (alone,) = [t for t in figures.turns if t.protocol == turn.answered_by and t.turn == turn.turn]
        assert (turn.f1, turn.n) == (alone.f1, alone.n)
    assert OWN_PREFILL not in {t.arm for t in summarise(answers, gold_history=False, resamples=1000).turns}
