"""S9: a chat template takes little time and memory, or is refused in a line."""

import pytest

from relax_hpc.cli.demo import models
from relax_hpc.data import template as templates
from relax_hpc.data.template import Template
from relax_hpc.errors import ConfigError

ASKED = [{"role": "user", "content": "1+1="}]
LONG = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{% set n = messages | length %}{{ (n + 9) ** 1000000000 > 1 }}",
}
LONGER = {
    "a power, by whoever compiles": "{{ 10 ** 1000000000 > 1 }}",
    "calls that call": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
}
LARGE = {
    "a filter": "{{ 'x' | center(1000000000) }}",
    "a product": "{{ 'a' * 10 ** 10 }}",
    "doubling": "{% set ns = namespace(s='xx') %}{% for a in range(50) %}{% set ns.s = ns.s ~ ns.s "
    "%}{% endfor %}{{ ns.s }}",
    "replacing": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
}
REFUSED = ["{{ range(10 ** 9) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]


def template_of(text):
    tokens = models.tokenizer(chat_template=text)
    tokens.name_or_path = "/model"
    return Template(tokens)


@pytest.mark.parametrize(
    "case", [*LONG, *LARGE, *(pytest.param(c, marks=pytest.mark.long) for c in LONGER)]
)
def test_a_template_that_would_take_for_ever_is_refused_in_a_line(case, monkeypatch):
    """S9: two of these took all the memory, or did not end."""
    monkeypatch.setattr(templates, "MOST_CPU_S", 1)
    monkeypatch.setattr(templates, "MOST_BYTES", 1 << 28)
    with pytest.raises(ConfigError) as caught:
        template_of((LONG | LONGER | LARGE)[case]).render("x.jsonl, line 3", ASKED)
    said = str(caught.value)
    assert said.startswith("/model/tokenizer_config.json: the chat template ")
    assert said.endswith("; correct it (it was to render x.jsonl, line 3)")
    assert ("computes for more than 1 s" if case in LONG | LONGER else "or makes more than") in said


@pytest.mark.parametrize("text", REFUSED)
def test_what_the_sandbox_or_python_refuses_is_told_as_before(text):
    with pytest.raises(ConfigError, match="the chat template fails: "):
        template_of(text).render("x.jsonl, line 3", ASKED)


def test_a_template_that_grows_with_what_it_is_given_is_refused_where_it_does(monkeypatch):
    """S9: it was tried with another text."""
    monkeypatch.setattr(templates, "MOST_CHARACTERS", 1000)
    template = template_of("{{ messages[0].content * 100 }}")
    assert template.render("line 1", ASKED) == "1+1=" * 100
    with pytest.raises(ConfigError, match=r"makes 1,100 characters; .* render line 2\)"):
        template.render("line 2", [{"role": "user", "content": "x" * 11}])


def test_a_template_of_everyday_is_tried_once_and_rendered_as_before(monkeypatch):
    tried = []
    monkeypatch.setattr(templates, "fault", lambda *given: tried.append(given) or "")
    template = template_of(models.CHAT_TEMPLATE + "{# anew #}")
    said = [template.render("x", ASKED, add_generation_prompt=True) for _ in range(3)]
    assert len(tried) == 1 and set(said) == {
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    }
