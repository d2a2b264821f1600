#compdef amp-rewrite
# Completion of amp-rewrite for zsh. For this shell alone, after `autoload -U compinit; compinit`:
#   eval "$(amp-rewrite completion zsh)"
# For every new shell, in a folder of $fpath:
#   mkdir -p ~/.zfunc && amp-rewrite completion zsh > ~/.zfunc/_amp-rewrite
#   and in ~/.zshrc before compinit: fpath+=~/.zfunc

_amp_rewrite_completion() {
    local line
    local -a parts plain described open
    local request="${(j: :)words[1,CURRENT]}"
    [[ $words[CURRENT] == --*=* ]] && compset -P '--*='
    for line in "${(@f)$(COMP_LINE=$request _AMP_REWRITE_COMPLETE=zsh_complete ${~words[1]} 2>/dev/null)}"; do
        parts=("${(@ps:\t:)line}")
        case $parts[1] in
            plain) [[ -n $parts[3] ]] && described+=("${parts[2]//:/\\:}:$parts[3]") || plain+=("$parts[2]") ;;
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
    _amp_rewrite_completion "$@"
else
    compdef _amp_rewrite_completion amp-rewrite
fi
