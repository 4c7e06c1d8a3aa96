"""`ariadne completion`: a static script that completes commands and options, made from the parser itself."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping

from ariadne.cli.options import Parser
from ariadne.cli.output import Answer

Options = Mapping[
    str, Mapping[str, tuple[str, ...] | None]
]  # command -> option -> its choices; None: it takes no value
_HOW = {
    "bash": "# ariadne completion bash > ~/.ariadne-completion, and in ~/.bashrc:  . ~/.ariadne-completion",
    "zsh": "# ariadne completion zsh > ~/.ariadne-completion, and in ~/.zshrc, after compinit:  . ~/.ariadne-completion",
    "fish": "# ariadne completion fish > ~/.config/fish/completions/ariadne.fish",
}


def run(options: Namespace) -> Answer:
    """Print the script."""
    known = known_options(options.parser)
    made = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](known)
    return Answer(f"{_HOW[options.shell]}\n{made}", {"shell": options.shell, "script": made})


def known_options(parser: Parser) -> dict[str, dict[str, tuple[str, ...] | None]]:
    """Of each command, its options, and what each may be where that is a fixed set (empty where it is not)."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: {
            option: None if action.nargs == 0 else tuple(map(str, action.choices or ()))
            for action in made._actions
            for option in (action.option_strings or ["" if action.choices else None])
            if option is not None
        }
        for name, made in commands.choices.items()
    }


def _words(options: Mapping[str, tuple[str, ...] | None]) -> str:
    return " ".join([*(o for o in options if o.startswith("-")), *(options.get("") or ())])


def _bash(known: Options) -> str:
    cases = []
    for name, options in known.items():
        for option, choices in options.items():
            if option and choices:
                cases.append(f'    {name}:{option}) words="{" ".join(choices)}" ;;')
        valued = [f"{name}:{o}" for o, choices in options.items() if o and choices == ()]
        cases += [f'    {"|".join(valued)}) COMPREPLY=($(compgen -f -- "$cur")); return ;;'] if valued else []
        cases.append(f'    {name}:*) words="{_words(options)}" ;;')
    return "\n".join(
        [
            "_ariadne() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words',
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    COMPREPLY=($(compgen -W "{" ".join(known)} --help" -- "$cur")); return',
            "  fi",
            '  case "${COMP_WORDS[1]}:$prev" in',
            *cases,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            '  case "$cur" in -*) ;; *) COMPREPLY+=($(compgen -f -- "$cur")) ;; esac',
            "}",
            "complete -o filenames -F _ariadne ariadne",
        ]
    )


def _zsh(known: Options) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(known)


def _fish(known: Options) -> str:
    lines = [f"complete -c ariadne -n __fish_use_subcommand -f -a '{' '.join(known)}'"]
    for name, options in known.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for option, choices in options.items():
            if option.startswith("--"):
                value = "" if choices is None else f" -x -a '{' '.join(choices)}'" if choices else " -r"
                lines.append(f"complete -c ariadne {seen} -l {option[2:]}{value}")
            elif not option and choices:
                lines.append(f"complete -c ariadne {seen} -f -a '{' '.join(choices)}'")
    return "\n".join(lines)
