"""Shell completions for bash, zsh and fish, made from the grammar.

The scripts have commands, options and fixed choices; they ask the daemon for ids of GPUs and processes as the user
types (`hegmctl __complete`, which is silent when there is none). The bash script does without the bash-completion
package's functions, so that it also works where only bash itself is installed.
"""

from __future__ import annotations

from collections.abc import Iterable

from hegmctl.grammar import GLOBAL_OPTIONS, GROUPS, PROGRAM
from hegmctl.grammar.rows import Command
from hegmctl.grammar.words import COMMAND_NAMES, FILES, FLAG, GPUS, JOBS, PIDS, PLACES, Argument, Option
from hegmctl.help import shown_commands

# The queries of the daemon.
ASKED = (GPUS, PLACES, JOBS, PIDS)
_HEAD = "Completion of hegmctl for {of}, made from its grammar by `python3 -m tools.docs.hegmctl completions`."


def completions() -> dict[str, str]:
    """Every script under the name that its shell expects."""
    return {"hegmctl.bash": bash(), "_hegmctl": zsh(), "hegmctl.fish": fish()}


def _first_words() -> dict[str, str]:
    """Return the words that can follow `hegmctl`, and their meanings."""
    return {command.name: command.summary for command in shown_commands() if " " not in command.name} | GROUPS


def _within(group: str) -> dict[str, str]:
    return {
        command.name.split()[1]: command.summary for command in shown_commands() if command.name.startswith(f"{group} ")
    }


def _takes_value(option: Option) -> bool:
    """Whether the next word is its value."""
    return option.kind != FLAG and option.implied is None


def _all_options() -> Iterable[Option]:
    yield from GLOBAL_OPTIONS
    for command in shown_commands():
        yield from command.options


# ---- bash ------------------------------------------------------------------------------------------------------------

_BASH = """\
# {head}

_hegmctl_candidates() {{  # KIND CURRENT: what can stand here
    local socket=()
    if [[ -n $hegm_socket ]]; then socket=(--socket "$hegm_socket"); fi
    case $1 in
        {files}) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$2") ;;
        {asked})
            local known
            known=$("${{COMP_WORDS[0]}}" "${{socket[@]}}" __complete "$1" 2>/dev/null)
            mapfile -t COMPREPLY < <(compgen -W "$known" -- "$2") ;;
        *) mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2") ;;
    esac
}}

_hegmctl() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} verb='' option='' hegm_socket='' word i places=0
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        option=''
        case $word in
            --)
                if declare -F _command_offset >/dev/null; then _command_offset $((i + 1)); return; fi
                mapfile -t COMPREPLY < <(compgen -c -- "$current")
                return ;;
            =) ((i++)) ;;  # bash takes --option=value apart into three words
            {valued})
                option=$word
                if [[ ${{COMP_WORDS[i + 1]}} == "=" ]]; then ((i++)); fi
                ((i++))
                if [[ $option == --socket ]]; then hegm_socket=${{COMP_WORDS[i]}}; fi ;;
            -*) ;;
            *) case "$verb $word" in
{verbs}
                *) ((places++)) ;;
            esac ;;
        esac
    done
    # The word to be completed is the value of the option before it, if the loop went past it.
    if ((i > COMP_CWORD)); then
        if [[ $current == "=" ]]; then current=''; fi
        case $verb$option in
{values}
        esac
        return
    fi
    case $verb in
{words}
    esac
}}

complete -F _hegmctl {program}
"""


def bash() -> str:
    """The script for bash."""
    verbs = [f'                " {word}") verb={word} ;;' for word in _first_words()]
    for group in GROUPS:
        verbs += [f'                "{group} {word}") verb="{group} {word}" ;;' for word in _within(group)]
    valued = dict.fromkeys(name for option in _all_options() if _takes_value(option) for name in option.names)
    values = [
        _bash_value(" | ".join(f"*{name}" for name in option.names), option)
        for option in GLOBAL_OPTIONS
        if _takes_value(option)
    ]
    values += [
        _bash_value(" | ".join(f'"{command.name}{name}"' for name in option.names), option)
        for command in shown_commands()
        for option in command.options
        if _takes_value(option)
    ]
    words = [_bash_words("''", " ".join(_first_words()), ())]
    words += [_bash_words(group, " ".join(_within(group)), ()) for group in GROUPS]
    words += [_bash_words(f'"{command.name}"', "", command.options, command.arguments) for command in shown_commands()]
    return _BASH.format(
        head=_HEAD.format(of="bash"),
        files=FILES,
        asked="|".join(ASKED),
        valued=" | ".join(valued),
        verbs="\n".join(verbs),
        values="\n".join(values),
        words="\n".join(words),
        program=PROGRAM,
    )


def _bash_value(pattern: str, option: Option) -> str:
    kind = option.complete or " ".join(option.choices)
    return f"""            {pattern}) _hegmctl_candidates "{kind}" "$current" ;;"""


def _bash_words(pattern: str, first: str, options: tuple[Option, ...], arguments: tuple[Argument, ...] = ()) -> str:
    names = " ".join(name for option in (*options, *GLOBAL_OPTIONS) for name in option.names)
    lines = [
        f"        {pattern})",
        f"            if [[ $current == -* ]]; then _hegmctl_candidates '{names}' \"$current\"",
    ]
    if first:
        lines.append(f"            else _hegmctl_candidates '{first}' \"$current\"")
    for place, argument in enumerate(arguments):
        condition = "" if argument.many else f" && ((places == {place}))"
        lines.append(f"            elif true{condition}; then {_bash_argument(argument)}")
    return "\n".join([*lines, "            fi ;;"])


def _bash_argument(argument: Argument) -> str:
    fixed = list(_first_words()) if argument.complete == COMMAND_NAMES else list(argument.choices)
    if argument.complete in ASKED:
        more = f'; COMPREPLY+=($(compgen -W "{" ".join(fixed)}" -- "$current"))' if fixed else ""
        return f'_hegmctl_candidates {argument.complete} "$current"{more}'
    return f"""_hegmctl_candidates '{" ".join(fixed)}' "$current\""""


# ---- zsh -------------------------------------------------------------------------------------------------------------

_ZSH = """\
#compdef {program}
# {head}

_hegmctl_live() {{  # what the daemon knows, and words that can stand there as well
    local kind=$1; shift
    local -a found
    found=(${{(f)"$($hegmctl_program ${{hegmctl_socket:+--socket}} $hegmctl_socket __complete $kind 2>/dev/null)"}} $@)
    compadd -- $found
}}

_hegmctl() {{
    local hegmctl_program=$words[1] hegmctl_socket
    local context state state_descr curcontext=$curcontext
    local -a line common
    typeset -A opt_args
    common=(
{options}
    )
    _arguments -C -S $common '1: :->command' '*:: :->rest'
    hegmctl_socket=${{opt_args[--socket]}}
    case $state in
        command)
            local -a commands
            commands=(
{commands}
            )
            _describe -t commands 'command' commands ;;
        rest)
            case $line[1] in
{verbs}
            esac ;;
    esac
}}

_hegmctl "$@"
"""


def zsh() -> str:
    """The script for zsh."""
    single = [command for command in shown_commands() if " " not in command.name]
    branches = [_zsh_branch(command.name, command, 16) for command in single]
    for group in GROUPS:
        inner = "\n".join(
            _zsh_branch(command.name.split()[1], command, 24)
            for command in shown_commands()
            if command.name.startswith(f"{group} ")
        )
        described = "\n".join(f"{'':28}{_zsh_quoted(f'{word}:{doc}')}" for word, doc in _within(group).items())
        branches.append(
            f"                {group})\n                    _arguments -C -S $common '1: :->command' '*:: :->rest'\n"
            "                    case $state in\n"
            f"                        command) local -a commands; commands=(\n{described}\n"
            "                        ); _describe -t commands 'command' commands ;;\n"
            f"                        rest) case $line[1] in\n{inner}\n                        esac ;;\n"
            "                    esac ;;"
        )
    return _ZSH.format(
        program=PROGRAM,
        head=_HEAD.format(of="zsh"),
        options="\n".join(f"        {spec}" for option in GLOBAL_OPTIONS for spec in _zsh_option(option)),
        commands="\n".join(f"                {_zsh_quoted(f'{word}:{doc}')}" for word, doc in _first_words().items()),
        verbs="\n".join(branches),
    )


def _zsh_branch(word: str, command: Command, indent: int) -> str:
    specs = [spec for option in command.options for spec in _zsh_option(option)]
    for place, argument in enumerate(command.arguments, 1):
        position = "*" if argument.many else str(place)
        specs.append(_zsh_quoted(f"{position}:{argument.name}:{_zsh_action(argument.complete, argument)}"))
    if command.tail:
        specs.append("'*:::command:_normal'")
    return f"{'':{indent}}{word}) _arguments -S $common {' '.join(specs)} ;;"


def _zsh_option(option: Option) -> list[str]:
    doc = option.doc.replace("[", "(").replace("]", ")").replace(":", "\\:")
    value = ""
    if option.kind != FLAG:
        separator = "::" if option.implied is not None else ":"
        value = f"{separator}{option.metavar}:{_zsh_action(option.complete, option)}"
    specs: list[str] = []
    for name in option.names:
        attached = ""
        if value:
            attached = (
                ("=-" if option.implied is not None else "=")
                if name.startswith("--")
                else ("-" if option.implied is not None else "+")
            )
        several = "*" if option.repeats else ""
        specs.append(_zsh_quoted(f"{several}{name}{attached}[{doc}]{value}"))
    return specs


def _zsh_action(complete: str, of: Option | Argument) -> str:
    if complete == FILES:
        return "_files"
    if complete in ASKED:
        return f" _hegmctl_live {' '.join((complete, *of.choices))}"  # a blank first: called with these words alone
    words = tuple(_first_words()) if complete == COMMAND_NAMES else of.choices
    return f"({' '.join(words)})" if words else " "


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# ---- fish ------------------------------------------------------------------------------------------------------------


_FISH_PLACES = """\
function __hegmctl_places  # how many words before this one are neither options nor their values
    set -l places 0
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if contains -- $word {valued}
            set skip 1
        else if not string match -q -- '-*' $word
            set places (math $places + 1)
        end
    end
    echo $places
end
"""


def fish() -> str:
    """The script for fish."""
    valued = " ".join(dict.fromkeys(name for option in _all_options() if _takes_value(option) for name in option.names))
    lines = [f"# {_HEAD.format(of='fish')}", "", _FISH_PLACES.format(valued=valued), f"complete -c {PROGRAM} -f"]
    first = f"not __fish_seen_subcommand_from {' '.join(_first_words())}"
    lines += [_fish(first, f"-a {word}", doc) for word, doc in _first_words().items()]
    lines += [_fish("", _fish_option(option), option.doc) for option in GLOBAL_OPTIONS]
    for group in GROUPS:
        inner = " ".join(_within(group))
        condition = f"__fish_seen_subcommand_from {group}; and not __fish_seen_subcommand_from {inner}"
        lines += [_fish(condition, f"-a {word}", doc) for word, doc in _within(group).items()]
    for command in shown_commands():
        words = command.name.split()
        subcommand_seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words)
        lines += [_fish(subcommand_seen, _fish_option(option), option.doc) for option in command.options]
        for place, argument in enumerate(command.arguments, len(words)):
            here = subcommand_seen if argument.many else f"{subcommand_seen}; and test (__hegmctl_places) -eq {place}"
            if candidates := _fish_words(argument.complete, argument):
                lines.append(_fish(here, f"-a {candidates}", argument.doc))
    return "\n".join([*lines, ""])


def _fish(condition: str, what: str, doc: str) -> str:
    when = f" -n {_fish_quoted(condition)}" if condition else ""
    return f"complete -c {PROGRAM}{when} {what} -d {_fish_quoted(doc)}"


def _fish_option(option: Option) -> str:
    forms = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    if option.kind == FLAG or option.implied is not None:
        return forms
    if option.complete == FILES:
        return f"{forms} -r -F"
    words = _fish_words(option.complete, option)
    return f"{forms} -x -a {words}" if words else f"{forms} -x"


def _fish_words(complete: str, of: Option | Argument) -> str:
    fixed = " ".join(_first_words() if complete == COMMAND_NAMES else of.choices)
    live = f"({PROGRAM} __complete {complete} 2>/dev/null)" if complete in ASKED else ""
    words = " ".join(part for part in (live, fixed) if part)
    return _fish_quoted(words) if words else ""


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
