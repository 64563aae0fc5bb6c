#!/usr/bin/env python3
"""Renders chat templates as Hugging Face's transformers does, with the real Jinja2: the oracle of text_chat_templates.

Reads {"templates": {name: source}, "conversations": {name: variables}} from standard input and writes
{template: {conversation: {"text": ...} | {"raised": ...} | {"error": ...}}} to standard output. `raised` is what the template
itself refused with raise_exception; `error` is any other failure. The environment is that of transformers'
utils/chat_template_utils.py (_compile_jinja_template); nothing here knows what the templates say.
"""

import datetime
import json
import sys

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Raised(Exception):
    """raise_exception was called."""


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: its content."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_content")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _content(self, caller):
        return caller()


def raise_exception(message):
    raise Raised(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format):
    return datetime.datetime.now().strftime(format)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def render(template, variables):
    try:
        return {"text": template.render(**{"tools": None, "documents": None, **variables})}
    except Raised as raised:
        return {"raised": str(raised)}
    except Exception as error:  # Whatever a template can run into is its result.
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    work = json.load(sys.stdin)
    env = environment()
    results = {}
    for name, source in work["templates"].items():
        try:
            template = env.from_string(source)
        except jinja2.TemplateError as error:
            failed = {"error": f"{type(error).__name__}: {error}"}
            results[name] = {conversation: failed for conversation in work["conversations"]}
            continue
        results[name] = {
            conversation: render(template, variables) for conversation, variables in work["conversations"].items()
        }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
