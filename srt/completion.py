"""``banyan completion``: a script that completes commands and options, made from the parser itself."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")

_BASH = """_banyan() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    case "${{COMP_WORDS[1]}} $previous" in
{choices}
    esac
    case "${{COMP_WORDS[1]}}" in
{options}
        *) COMPREPLY=($(compgen -W "{commands}" -- "$current")) ;;
    esac
}}
complete -o default -F _banyan banyan
"""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for one of SHELLS."""
    if shell == "fish":
        return "\n".join(_fish(parser)) + "\n"
    bash = _bash(parser)
    return bash if shell == "bash" else "autoload -U +X bashcompinit && bashcompinit\n" + bash


def _bash(parser: argparse.ArgumentParser) -> str:
    choices, options = [], []
    for name, command in _commands(parser):
        flags: list[str] = []
        for action in _options(command):
            flags += action.option_strings
            if action.choices:
                pattern = "|".join(f'"{name} {flag}"' for flag in action.option_strings)
                words = " ".join(map(str, action.choices))
                choices.append(f'        {pattern}) COMPREPLY=($(compgen -W "{words}" -- "$current")); return ;;')
        options.append(f'        {name}) COMPREPLY=($(compgen -W "{" ".join(flags)}" -- "$current")) ;;')
    commands = " ".join(name for name, _ in _commands(parser))
    return _BASH.format(choices="\n".join(choices), options="\n".join(options), commands=commands)


def _fish(parser: argparse.ArgumentParser) -> Iterator[str]:
    for name, command in _commands(parser):
        yield f"complete -c banyan -n __fish_use_subcommand -f -a {name} -d '{_quoted(command.description or '')}'"
        for action in _options(command):
            flags = " ".join(f"-l {flag[2:]}" for flag in action.option_strings if flag.startswith("--"))
            values = f" -x -a '{' '.join(map(str, action.choices))}'" if action.choices else ""
            yield f"complete -c banyan -n '__fish_seen_subcommand_from {name}' {flags}{values} -d '{_quoted(action.help or '')}'"


def _quoted(text: str) -> str:
    return text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'")


def _commands(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    return [item for action in parser._actions if isinstance(action, argparse._SubParsersAction) for item in action.choices.items()]


def _options(command: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in command._actions if action.option_strings and action.help != argparse.SUPPRESS]
