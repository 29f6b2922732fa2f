"""The policy file: closed, complete, fingerprinted."""

from __future__ import annotations

import pytest
import yaml

from kvbench.errors import BadInputError
from kvbench.screening.policy import default_text, load_policy


def edited(tmp_path, change):
    values = yaml.safe_load(default_text())
    change(values)
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_shipped_policy_is_what_default_means(tmp_path):
    copy = tmp_path / "copy.yaml"
    copy.write_text(default_text())
    assert load_policy() == load_policy("default") == load_policy(copy)
    assert load_policy(copy).fingerprint() == load_policy().fingerprint()


def test_the_fingerprint_follows_values_and_not_comments(tmp_path):
    bare = edited(tmp_path, lambda values: None)
    assert load_policy(bare).fingerprint() == load_policy().fingerprint()
    other = edited(tmp_path, lambda values: values["retention"].update(task=0.91))
    assert load_policy(other).fingerprint() != load_policy().fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(retentoin={"task": 0.9}), "unknown key 'retentoin', did you mean 'retention'"),
        (lambda v: v["retention"].update(tasks=0.9), "unknown key 'retention.tasks', did you mean 'task'"),
        (lambda v: v["canary"].update(floor=0.5), "unknown key 'canary.floor'"),
        (lambda v: v.pop("speed"), "key 'speed' is missing"),
        (lambda v: v["retention"].update(task=1.5), "retention.task is 1.5"),
        (lambda v: v["retention"].update(task="high"), "retention.task is 'high'"),
        (lambda v: v.update(level=float("nan")), "level is nan"),
        (lambda v: v["speed"].update(lengths=[]), "speed.lengths is"),
        (lambda v: v["warnings"].update(cosine={"at_least": 0.9}), "no figure of `kvbench diagnose`"),
        (lambda v: v["warnings"].update(kl_nats={"at_least": 0.1, "at_most": 0.2}), "exactly one of at_least and at_most"),
        (lambda v: v.update(version=2), "version is 2"),
    ],
)
def test_mistakes_are_named(tmp_path, change, message):
    with pytest.raises(BadInputError) as caught:
        load_policy(edited(tmp_path, change))
    assert message in str(caught.value)
    assert "policy.yaml" in str(caught.value)


def test_files_that_are_no_policy(tmp_path):
    with pytest.raises(BadInputError, match="does not exist"):
        load_policy(tmp_path / "nowhere.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(BadInputError, match="holds list"):
        load_policy(path)
    path.write_text("a: [")
    with pytest.raises(BadInputError, match="is not YAML"):
        load_policy(path)
