# Completion of amp-rewrite for fish. For this shell alone:
#   amp-rewrite completion fish | source
# For every new shell:
#   amp-rewrite completion fish > ~/.config/fish/completions/amp-rewrite.fish

function _amp_rewrite_completion
    set -l line (commandline -cp | string collect)
    for item in (env COMP_LINE="$line" _AMP_REWRITE_COMPLETE=fish_complete (commandline -opc)[1] 2>/dev/null)
        set -l parts (string split \t -- $item)
        switch $parts[1]
            case plain open
                printf '%s\t%s\n' $parts[2] "$parts[3]"
            case glob
                __fish_complete_suffix (string replace '*' '' -- $parts[2])
            case file
                printf "$parts[3]%s
" (__fish_complete_path $parts[2])
            case dir
                printf "$parts[3]%s
" (__fish_complete_directories $parts[2])
        end
    end
end
complete --no-files --command amp-rewrite --arguments "(_amp_rewrite_completion)"
