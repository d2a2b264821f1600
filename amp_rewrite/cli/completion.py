"""Completion in shells: scripts, and the words that they ask this program for.

A script sends the command line up to the cursor and gets a line for each candidate: its kind, the word and its help,
separated by tabs. Kinds: `plain`; `open`, after which the word goes on; `glob`, files of that pattern and folders;
`file` and `dir`, for any.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

_BASH = """\
# Completion of amp-rewrite for bash 4.4 and later. For this shell alone:
#   eval "$(amp-rewrite completion bash)"
# For every new shell, where the package bash-completion is installed:
#   mkdir -p ~/.local/share/bash-completion/completions
#   amp-rewrite completion bash > ~/.local/share/bash-completion/completions/amp-rewrite

%(complete_func)s() {
    local -; set -f  # names of files are no patterns
    local IFS=$'\\n' kind word help cur=${COMP_WORDS[COMP_CWORD]}
    [[ $cur == [=:] ]] && cur=
    COMPREPLY=()
    while IFS=$'\\t' read -r kind word help; do
        case $kind in
            plain) COMPREPLY+=("$word") ;;
            open) COMPREPLY+=("$word"); compopt -o nospace ;;
            glob)
                compopt -o filenames
                COMPREPLY+=($(compgen -f -X "!$word" -- "$cur") $(compgen -d -- "$cur")) ;;
            file) compopt -o filenames; COMPREPLY+=($(compgen -f -- "$cur")) ;;
            dir) compopt -o filenames; COMPREPLY+=($(compgen -d -- "$cur")) ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_CUR="$cur" %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_ZSH = """\
#compdef %(prog_name)s
# Completion of amp-rewrite for zsh. For this shell alone, after `autoload -U compinit; compinit`:
#   eval "$(amp-rewrite completion zsh)"
# For every new shell, in a folder of $fpath:
#   mkdir -p ~/.zfunc && amp-rewrite completion zsh > ~/.zfunc/_amp-rewrite
#   and in ~/.zshrc before compinit: fpath+=~/.zfunc

%(complete_func)s() {
    local line
    local -a parts plain described open
    local request="${(j: :)words[1,CURRENT]}"
    [[ $words[CURRENT] == --*=* ]] && compset -P '--*='
    for line in "${(@f)$(COMP_LINE=$request %(complete_var)s=zsh_complete ${~words[1]} 2>/dev/null)}"; do
        parts=("${(@ps:\\t:)line}")
        case $parts[1] in
            plain) [[ -n $parts[3] ]] && described+=("${parts[2]//:/\\\\:}:$parts[3]") || plain+=("$parts[2]") ;;
            open) open+=("$parts[2]") ;;
            glob) _files -g "$parts[2]" ;;
            file) _files ;;
            dir) _files -/ ;;
        esac
    done
    (( $#described )) && _describe -V unsorted described
    (( $#plain )) && compadd -V unsorted -a plain
    (( $#open )) && compadd -V unsorted -S '' -a open
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
_FISH = """\
# Completion of amp-rewrite for fish. For this shell alone:
#   amp-rewrite completion fish | source
# For every new shell:
#   amp-rewrite completion fish > ~/.config/fish/completions/amp-rewrite.fish

function %(complete_func)s
    set -l line (commandline -cp | string collect)
    for item in (env COMP_LINE="$line" %(complete_var)s=fish_complete (commandline -opc)[1] 2>/dev/null)
        set -l parts (string split \\t -- $item)
        switch $parts[1]
            case plain open
                printf '%%s\\t%%s\\n' $parts[2] "$parts[3]"
            case glob
                __fish_complete_suffix (string replace '*' '' -- $parts[2])
            case file
                printf "$parts[3]%%s\n" (__fish_complete_path $parts[2])
            case dir
                printf "$parts[3]%%s\n" (__fish_complete_directories $parts[2])
        end
    end
end
complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


NAME = "amp-rewrite"
COMPLETE = "_AMP_REWRITE_COMPLETE"
"""The variable in which a shell asks for completions; click derives it from the name."""


class _Complete(ShellComplete):
    """Completion of the command line up to the cursor, however a shell splits it into words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words after the program's name, and the one at the cursor."""
        words = split_arg_string(
            os.environ["COMP_LINE"] + "|"
        )  # the mark ends the word at the cursor, even an empty one
        while len(words) > 1 and Path(words[0]).name != self.prog_name:
            words.pop(0)  # assignments, and commands such as nice
        return words[1:-1], words[-1][:-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        option, equals, value = incomplete.partition("=")
        if not (equals and option.startswith("--")):
            return [self.fitted(item, "", incomplete) for item in super().get_completions(args, incomplete)]
        return [self.fitted(item, option + equals, value) for item in super().get_completions([*args, option], value)]

    def fitted(self, item: CompletionItem[str], option: str, written: str) -> CompletionItem[str]:
        """Return a candidate as the shell puts it in place of `written`; `option`: "--option=" before it, if any."""
        return item

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{item.type}\t{item.value}\t{' '.join((item.help or '').split())}"


class _Bash(_Complete):
    name = "bash"
    source_template = _BASH

    def fitted(self, item: CompletionItem[str], option: str, written: str) -> CompletionItem[str]:
        """Drop the text up to the last "=" or ":", where bash begins a new word."""
        current = os.environ.get("COMP_CUR", written)
        if item.type in ("plain", "open") and written.endswith(current):
            return CompletionItem(item.value[len(written) - len(current) :], item.type, item.help)
        return item


class _Zsh(_Complete):
    name = "zsh"
    source_template = _ZSH


class _Fish(_Complete):
    name = "fish"
    source_template = _FISH

    def fitted(self, item: CompletionItem[str], option: str, written: str) -> CompletionItem[str]:
        """Add the option before the value in `--option=value`, which fish replaces as one word."""
        if item.type in ("plain", "open"):
            return CompletionItem(option + item.value, item.type, item.help)
        return CompletionItem(item.value, item.type, option)  # the script puts it before each file


_SHELLS: tuple[type[_Complete], ...] = (_Bash, _Zsh, _Fish)


def register() -> None:
    """Let click use these shells in the place of its own."""
    for shell in _SHELLS:
        add_completion_class(shell)


def script(shell: str, program: click.Command) -> str:
    """Return the completion script for a shell."""
    shell_class = {known.name: known for known in _SHELLS}[shell]
    return shell_class(program, {}, NAME, COMPLETE).source()


def patterns(incomplete: str) -> list[CompletionItem[str]]:
    """Return candidates for a pattern of ops: keys of terms, and op types behind keys that take one."""
    done, comma, term = incomplete.rpartition(",")
    before = done + comma
    key, equals, start = term.partition("=")
    if equals and key in ("op", "feeds", "fed_by"):
        return [CompletionItem(f"{before}{key}={op}") for op in ops(start)]
    keys = ("op=", "name=", "scope=", "feeds=", "fed_by=", "input=", "output=")
    return [CompletionItem(before + key, type="open") for key in keys if key.startswith(term)]


def ops(start: str) -> list[str]:
    """Return the types of ONNX ops that start so."""
    from onnx.defs import get_all_schemas

    return sorted({schema.name for schema in get_all_schemas() if not schema.domain and schema.name.startswith(start)})
