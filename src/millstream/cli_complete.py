"""Completion in bash, zsh and fish: what may follow the words typed so far. Answers without the heavy imports."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from millstream.cli_settings import SETTINGS, names_of, values_of
from millstream.errors import BadSetting

ASKED = "_MILLSTREAM_COMPLETE"  # set by the scripts below: the words follow as arguments, the last one unfinished

# bash takes `=` for the end of a word: the pieces are joined, and what comes before it is taken off the answers.
BASH = """_millstream() {
    local words=() part glued= i word
    for ((i = 1; i <= COMP_CWORD; i++)); do
        part=${COMP_WORDS[i]}
        if [[ ${#words[@]} -gt 0 && ( $part == [=:]* || $glued ) ]]; then words[-1]+=$part; else words+=("$part"); fi
        [[ $part == *[=:] ]] && glued=1 || glued=
    done
    local current=${words[-1]} before=
    [[ $current == *[=:]* ]] && before=${current%"${current##*[=:]}"}
    local IFS=$'\\n'
    COMPREPLY=($(_MILLSTREAM_COMPLETE=1 "$1" "${words[@]}" 2>/dev/null))
    for word in "${COMPREPLY[@]}"; do [[ $word == *= ]] && compopt -o nospace; done
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o default -F _millstream millstream
"""
ZSH = """#compdef millstream
_millstream() {
    local -a found open
    found=(${(f)"$(_MILLSTREAM_COMPLETE=1 ${words[1]} "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    open=(${(M)found:#*=})
    found=(${found:#*=})
    (( ${#open} )) && compadd -S '' -- $open
    (( ${#found} )) && compadd -- $found
    (( ${#open} + ${#found} )) && return
    compset -P '*='
    _files
}
if [ "$funcstack[1]" = "_millstream" ]; then _millstream "$@"; else compdef _millstream millstream; fi
"""
FISH = """function __millstream
    set -l words (commandline -opc) (commandline -ct)
    _MILLSTREAM_COMPLETE=1 $words[1] $words[2..-1] 2>/dev/null
end
complete -c millstream -a '(__millstream)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

_OPTIONS = {  # what an option may be, where there are only so many
    "--engine": ["local", "ray"],
    "--on-mismatch": ["error", "skip", "null"],
    "--compression": ["none", "lz4", "zstd"],
    "--abundance": ["length", "equal", "lognormal"],
    "--only": ["traces", "reads"],
}
_FIRST = {"extract": ["facts", "world"]}  # what an argument may be beside a file


def candidates(group: Any, words: Sequence[str]) -> list[str]:
    """Whole words that the last one may become; none: a file, which the shell knows how to complete."""
    *before, current = words or [""]
    names = [word for word in before if not word.startswith("-")]
    command = group.commands.get(names[0]) if names else None
    if not names:
        options = [name for param in group.params for name in param.opts]
        return _fitting([*options, "--help"] if current.startswith("-") else group.commands, current)
    if command is None:
        return []
    options = [param for param in command.params if param.param_type_name == "option"]
    taking = {name for param in options if not (param.is_flag or param.count) for name in param.opts}
    if before[-1] in taking:
        chosen = ["facts", "smollm2"] if (names[0], before[-1]) == ("demo", "--model") else _OPTIONS.get(before[-1], [])
        return _fitting(chosen, current)
    if current.startswith("-"):
        found = [name for param in options for name in [*param.opts, *param.secondary_opts]]
        return _fitting([name for name in [*found, "--help"] if name.startswith("--")], current)
    given = [word for word, last in zip(before[1:], before, strict=False) if word in names[1:] and last not in taking]
    needed = sum(param.param_type_name == "argument" and param.required for param in command.params)
    if len(given) < needed:
        return _fitting(_FIRST.get(names[0], []) if not given else [], current)
    return _settings(names[0], current, given) if names[0] in SETTINGS else []


def detected_shell() -> str:
    """The shell that this was typed in."""
    shellingham: Any = import_module("shellingham")  # comes with typer, without types

    try:
        name: str = shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        name = Path(os.environ.get("SHELL", "")).name
    if name not in SCRIPTS:
        raise BadSetting(f"completion is for {', '.join(SCRIPTS)}, and this shell is {name or 'not known'}")
    return name


def install(shell: str) -> list[Path]:
    """Put the script where the shell finds it; the files that were written."""
    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    if shell == "fish":
        return [_write(config / "fish" / "completions" / "millstream.fish", FISH)]
    if shell == "zsh":
        line = "fpath+=~/.zfunc; autoload -Uz compinit; compinit"
        return [_write(home / ".zfunc" / "_millstream", ZSH), *_add_line(home / ".zshrc", line)]
    script = _write(home / ".bash_completions" / "millstream.sh", BASH)
    return [script, *_add_line(home / ".bashrc", f"source '{script}'")]


def answer(group: Any) -> None:
    """What a shell asked for, a word a line."""
    print("\n".join(candidates(group, sys.argv[1:])))


def _settings(command: str, current: str, given: Sequence[str]) -> list[str]:
    """Names as `name=`; after that values, of which several are separated by commas."""
    known = names_of(command, given)
    name, equals, value = current.partition("=")
    if not equals:
        used = {word.partition("=")[0] for word in given}
        return _fitting([f"{name}=" for name in known if name not in used], current)
    if name not in known:
        return []
    first, comma, _ = value.rpartition(",")
    chosen = [one for one in values_of(command, known[name], given) if one not in first.split(",")]
    return _fitting([f"{name}={first}{comma}{one}" for one in chosen], current)


def _fitting(words: Sequence[str] | Any, current: str) -> list[str]:
    return [word for word in words if word.startswith(current)]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _add_line(path: Path, line: str) -> list[Path]:
    text = path.read_text() if path.exists() else ""
    if line in text.splitlines():
        return []
    return [_write(path, f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n")]
