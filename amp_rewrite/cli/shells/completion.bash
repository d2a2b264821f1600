# Completion of amp-rewrite for bash 4.4 and later. For this shell alone:
#   eval "$(amp-rewrite completion bash)"
# For every new shell, where the package bash-completion is installed:
#   mkdir -p ~/.local/share/bash-completion/completions
#   amp-rewrite completion bash > ~/.local/share/bash-completion/completions/amp-rewrite

_amp_rewrite_completion() {
    local -; set -f  # names of files are no patterns
    local IFS=$'\n' kind word help cur=${COMP_WORDS[COMP_CWORD]}
    [[ $cur == [=:] ]] && cur=
    COMPREPLY=()
    while IFS=$'\t' read -r kind word help; do
        case $kind in
            plain) COMPREPLY+=("$word") ;;
            open) COMPREPLY+=("$word"); compopt -o nospace ;;
            glob)
                compopt -o filenames
                COMPREPLY+=($(compgen -f -X "!$word" -- "$cur") $(compgen -d -- "$cur")) ;;
            file) compopt -o filenames; COMPREPLY+=($(compgen -f -- "$cur")) ;;
            dir) compopt -o filenames; COMPREPLY+=($(compgen -d -- "$cur")) ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_CUR="$cur" _AMP_REWRITE_COMPLETE=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F _amp_rewrite_completion amp-rewrite
