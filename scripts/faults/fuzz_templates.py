"""Chat templates that do not end, grow without end or reach for Python: each renders or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fuzz_config import PROMPT
from tally import Tally, command

from neuronmm.models import chat
from tiny_models import make_tiny
from word_tokenizer import word_tokenizer

TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ i * 'a' }}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ '%999999999999d' % 1 }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ 'a'.center(10 ** 11) }}",
    "{{ 'a'.replace('', 'a' * 10 ** 6).replace('a', 'a' * 10 ** 6) }}",
    "{{ lipsum(n=10 ** 9) }}",
    "{{ range(10 ** 9) | list }}",
    "{{ ('a' * 10 ** 7) | wordwrap(1) | length }}",
    "{{ ('((' * 10 ** 5) | urlize | length }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(messages) }}{{ messages }}",
    "{{ self.__init__ }}{{ joiner.__init__.__globals__.os.popen('touch {touched}').read() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.getcwd() }}",
    "{{ [messages, messages] | tojson(indent=10 ** 10) }}",
    "{% for m in messages %}w3 {{ m['content'] }}{% endfor %}{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ strftime_now('%Y' * 10 ** 7) }}",
    "{{ '\ud800' }}",
    "w9 " * 10**6,
)


def study(work: Path, templates: int = len(TEMPLATES)) -> dict[str, Any]:
    """Give each template to ``generate --chat`` and to a calibration on text that the model writes itself."""
    torch.manual_seed(0)
    make_tiny().save_pretrained(work / "model")
    word_tokenizer().save_pretrained(work / "model")
    recipe, touched, tally = work / "recipe.yaml", work / "touched", Tally()
    recipe.write_text("calibration_rows: 4\ncalibration_length: 12\nmethod: asvd\nalign: 2\nrefine: 'off'\n")
    talk = ["generate", str(work / "model"), "--chat", "--prompt", PROMPT, "--max-new-tokens", "2", "--json"]
    chat.CPU_SECONDS = 1  # five would only take longer
    fit = ["compress", str(work / "model"), "-o", str(work / "out"), "--recipe", str(recipe)]
    for number, template in enumerate(TEMPLATES[:templates]):
        text = template.replace("{touched}", str(touched))
        (work / "model" / "chat_template.jinja").write_text(text, errors="surrogatepass")
        for words in (talk, fit) if number < 3 else (talk,):
            tally.add(f"{words[0]} {template[:60]}", lambda words=words: command(words)[0])
    result = tally.to_dict()
    if touched.exists():
        result["findings"].append("a template ran a program")
    return result
