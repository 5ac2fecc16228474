# Completion of hegmctl for bash, made from its grammar by `python3 -m hegmctl.pages completions`.

_hegmctl_candidates() {  # KIND CURRENT: what can stand here
    local socket=()
    if [[ -n $hegm_socket ]]; then socket=(--socket "$hegm_socket"); fi
    case $1 in
        files) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$2") ;;
        gpus|places|pids)
            local known
            known=$("${COMP_WORDS[0]}" "${socket[@]}" __complete "$1" 2>/dev/null)
            mapfile -t COMPREPLY < <(compgen -W "$known" -- "$2") ;;
        *) mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2") ;;
    esac
}

_hegmctl() {
    local current=${COMP_WORDS[COMP_CWORD]} verb='' option='' hegm_socket='' word i places=0
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        option=''
        case $word in
            --)
                if declare -F _command_offset >/dev/null; then _command_offset $((i + 1)); return; fi
                mapfile -t COMPREPLY < <(compgen -c -- "$current")
                return ;;
            =) ((i++)) ;;  # bash takes --option=value apart into three words
            --socket | --timeout | --gpu | --since | --run | --kind | -c | --count | --name | --checkpoint-every | --keep | --dir | --restart-tries | --resume | --simulate | --to | --via | --env | --python | --carrier | --hold | --drop | --stdout | --stderr)
                option=$word
                if [[ ${COMP_WORDS[i + 1]} == "=" ]]; then ((i++)); fi
                ((i++))
                if [[ $option == --socket ]]; then hegm_socket=${COMP_WORDS[i]}; fi ;;
            -*) ;;
            *) case "$verb $word" in
                " gpus") verb=gpus ;;
                " ps") verb=ps ;;
                " events") verb=events ;;
                " doctor") verb=doctor ;;
                " version") verb=version ;;
                " config") verb=config ;;
                " metrics") verb=metrics ;;
                " ping") verb=ping ;;
                " run") verb=run ;;
                " migrate") verb=migrate ;;
                " suspend") verb=suspend ;;
                " quiesce") verb=quiesce ;;
                " offload") verb=offload ;;
                " handoff") verb=handoff ;;
                " resume") verb=resume ;;
                " drain") verb=drain ;;
                " swap") verb=swap ;;
                " ops") verb=ops ;;
                " op") verb=op ;;
                " cancel") verb=cancel ;;
                " adopt") verb=adopt ;;
                " checkpoint") verb=checkpoint ;;
                " restore") verb=restore ;;
                " help") verb=help ;;
                " images") verb=images ;;
                " simulate") verb=simulate ;;
                "images ls") verb="images ls" ;;
                "images show") verb="images show" ;;
                "images verify") verb="images verify" ;;
                "images rm") verb="images rm" ;;
                "simulate hold") verb="simulate hold" ;;
                "simulate fault") verb="simulate fault" ;;
                *) ((places++)) ;;
            esac ;;
        esac
    done
    # The word to be completed is the value of the option before it, if the loop went past it.
    if ((i > COMP_CWORD)); then
        if [[ $current == "=" ]]; then current=''; fi
        case $verb$option in
            *--socket) _hegmctl_candidates "files" "$current" ;;
            *--timeout) _hegmctl_candidates "" "$current" ;;
            "ps--gpu") _hegmctl_candidates "gpus" "$current" ;;
            "events--since") _hegmctl_candidates "" "$current" ;;
            "events--run") _hegmctl_candidates "" "$current" ;;
            "events--kind") _hegmctl_candidates "config events gpu inventory operation pool process vendor" "$current" ;;
            "ping-c" | "ping--count") _hegmctl_candidates "" "$current" ;;
            "run--gpu") _hegmctl_candidates "places" "$current" ;;
            "run--name") _hegmctl_candidates "" "$current" ;;
            "run--checkpoint-every") _hegmctl_candidates "" "$current" ;;
            "run--keep") _hegmctl_candidates "" "$current" ;;
            "run--dir") _hegmctl_candidates "files" "$current" ;;
            "run--restart-tries") _hegmctl_candidates "" "$current" ;;
            "run--resume") _hegmctl_candidates "" "$current" ;;
            "run--simulate") _hegmctl_candidates "" "$current" ;;
            "migrate--to") _hegmctl_candidates "places" "$current" ;;
            "migrate--via") _hegmctl_candidates "restart" "$current" ;;
            "migrate--env") _hegmctl_candidates "" "$current" ;;
            "migrate--python") _hegmctl_candidates "files" "$current" ;;
            "migrate--carrier") _hegmctl_candidates "peer host worker driver" "$current" ;;
            "suspend--carrier") _hegmctl_candidates "peer host worker driver" "$current" ;;
            "quiesce--hold") _hegmctl_candidates "" "$current" ;;
            "offload--carrier") _hegmctl_candidates "peer host worker driver" "$current" ;;
            "resume--to") _hegmctl_candidates "places" "$current" ;;
            "drain--to") _hegmctl_candidates "gpus" "$current" ;;
            "adopt--to") _hegmctl_candidates "gpus" "$current" ;;
            "adopt--drop") _hegmctl_candidates "" "$current" ;;
            "checkpoint--carrier") _hegmctl_candidates "peer host worker driver" "$current" ;;
            "restore--to") _hegmctl_candidates "gpus" "$current" ;;
            "restore--stdout") _hegmctl_candidates "files" "$current" ;;
            "restore--stderr") _hegmctl_candidates "files" "$current" ;;
        esac
        return
    fi
    case $verb in
        '')
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            else _hegmctl_candidates 'gpus ps events doctor version config metrics ping run migrate suspend quiesce offload handoff resume drain swap ops op cancel adopt checkpoint restore help images simulate' "$current"
            fi ;;
        images)
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            else _hegmctl_candidates 'ls show verify rm' "$current"
            fi ;;
        simulate)
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            else _hegmctl_candidates 'hold fault' "$current"
            fi ;;
        "gpus")
            if [[ $current == -* ]]; then _hegmctl_candidates '-l --long --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "ps")
            if [[ $current == -* ]]; then _hegmctl_candidates '--gpu --ways -w --watch --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates pids "$current"
            fi ;;
        "events")
            if [[ $current == -* ]]; then _hegmctl_candidates '--since --run -f --follow --kind --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "doctor")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "version")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "config")
            if [[ $current == -* ]]; then _hegmctl_candidates '--reload --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "metrics")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "ping")
            if [[ $current == -* ]]; then _hegmctl_candidates '-c --count --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "simulate hold")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates gpus "$current"
            elif true && ((places == 1)); then _hegmctl_candidates '' "$current"
            fi ;;
        "simulate fault")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates gpus "$current"; COMPREPLY+=($(compgen -W "vendor" -- "$current"))
            elif true && ((places == 1)); then _hegmctl_candidates 'lost error hang unknown-memory ecc xid none' "$current"
            fi ;;
        "run")
            if [[ $current == -* ]]; then _hegmctl_candidates '--gpu --name --checkpoint-every --keep --dir --allow-restart --restart-tries --resume --simulate --no-daemon-start --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "migrate")
            if [[ $current == -* ]]; then _hegmctl_candidates '--to --via --allow-restart --env --python --carrier -n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates pids "$current"
            fi ;;
        "suspend")
            if [[ $current == -* ]]; then _hegmctl_candidates '--spill --carrier -n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates pids "$current"
            fi ;;
        "quiesce")
            if [[ $current == -* ]]; then _hegmctl_candidates '--hold -n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates pids "$current"
            fi ;;
        "offload")
            if [[ $current == -* ]]; then _hegmctl_candidates '--spill --carrier -n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates pids "$current"
            fi ;;
        "handoff")
            if [[ $current == -* ]]; then _hegmctl_candidates '-n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates pids "$current"
            elif true && ((places == 1)); then _hegmctl_candidates '' "$current"
            fi ;;
        "resume")
            if [[ $current == -* ]]; then _hegmctl_candidates '--to -n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates '' "$current"
            fi ;;
        "drain")
            if [[ $current == -* ]]; then _hegmctl_candidates '--to -n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates gpus "$current"
            fi ;;
        "swap")
            if [[ $current == -* ]]; then _hegmctl_candidates '-n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates pids "$current"
            elif true && ((places == 1)); then _hegmctl_candidates pids "$current"
            fi ;;
        "ops")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            fi ;;
        "op")
            if [[ $current == -* ]]; then _hegmctl_candidates '-f --follow --story --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates '' "$current"
            fi ;;
        "cancel")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates '' "$current"
            fi ;;
        "adopt")
            if [[ $current == -* ]]; then _hegmctl_candidates '--to --drop -y --yes -n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates '' "$current"
            fi ;;
        "checkpoint")
            if [[ $current == -* ]]; then _hegmctl_candidates '--leave-running --carrier -n --dry-run --wait --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates pids "$current"
            elif true && ((places == 1)); then _hegmctl_candidates '' "$current"
            fi ;;
        "restore")
            if [[ $current == -* ]]; then _hegmctl_candidates '--to --truncate-outputs --stdout --stderr -n --dry-run --no-wait --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates '' "$current"
            fi ;;
        "images ls")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates '' "$current"
            fi ;;
        "images show")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates '' "$current"
            fi ;;
        "images verify")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true && ((places == 0)); then _hegmctl_candidates '' "$current"
            fi ;;
        "images rm")
            if [[ $current == -* ]]; then _hegmctl_candidates '-y --yes --socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates '' "$current"
            fi ;;
        "help")
            if [[ $current == -* ]]; then _hegmctl_candidates '--socket --json -q --quiet --color --no-color --timeout -h --help --version' "$current"
            elif true; then _hegmctl_candidates 'gpus ps events doctor version config metrics ping run migrate suspend quiesce offload handoff resume drain swap ops op cancel adopt checkpoint restore help images simulate' "$current"
            fi ;;
    esac
}

complete -F _hegmctl hegmctl
